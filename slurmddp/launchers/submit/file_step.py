"""Measure the file system of a folder from this machine and from nodes, by a short step of srun.

srun starts this module once on each node. Its pipes connect the tasks with this machine: each task prints its
values as lines, and srun passes the answer to all tasks. So no port is opened, and no file is read that the
measurement is about.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from slurmddp.environments.scrub import scrub
from slurmddp.environments.srun_options import STEP_OPTIONS
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, SlurmddpError, SlurmError
from slurmddp.runs.folder.file_system import FileSystem
from slurmddp.runs.folder.measure_files import measure
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.reasons import explain
from slurmddp.slurm.sbatch_options import Option, sbatch_options, srun_options

START_S = 300.0
"""Seconds that the step may wait in the queue."""
LIMIT_S = 70.0
"""Seconds to wait for a change of another host: clients of network file systems cache for up to a minute."""
_TIME_LIMIT_MIN = 6
_MEM_GB = 2
_ANSWER_S = 30.0
"""Seconds that a host waits for the other hosts' values, in addition to the time of the measurement."""
_END_S = 10.0
"""Seconds for srun to end."""
_MARK = "slurmddp-files "
"""The beginning of a task's lines; set-up lines and the site's scripts may print other lines."""
_OF_BATCH = ("output", "open-mode", "signal", "requeue", "no-requeue", "no-kill")
"""Options of sbatch that a short step of srun does not need."""
_SETUP = '{{ {lines}\n}} </dev/null >&2\nexec "$@"'
_ROUTINE = re.compile(
    "queued and waiting|has been allocated|Exited with exit code|Terminating|CANCELLED|Job step aborted"
    "|going to /tmp"
)
"""Lines of srun that don't show why a step failed."""


def measure_on_nodes(
    job: Job,
    folder: Path,
    nodes: int,
    slurm: SlurmClient,
    *,
    start_s: float = START_S,
    limit_s: float = LIMIT_S,
) -> FileSystem:
    """Measure the file system of a folder from this machine and from nodes of a job's partition.

    Args:
        job: a job of the cluster file; the step has its partition, account and other such options.
        folder: the folder.
        nodes: the number of nodes.
        slurm: the client of the site's SLURM.
        start_s: seconds that the step may wait in the queue; after that it is cancelled.
        limit_s: seconds to wait for a change of another host.

    Raises:
        SlurmError: srun failed, or the step has not started in time.
        ConfigError: a host does not see the folder, or can't write there.
        SlurmddpError: a node has left, or is silent.
    """
    name = f"slurmddp-files-{secrets.token_hex(4)}"
    program = [job.python, "-m", __name__, str(folder), str(limit_s)]
    if job.cluster.setup:
        program = ["bash", "-c", _SETUP.format(lines="\n".join(job.cluster.setup)), "bash", *program]
    command = ["srun", *STEP_OPTIONS, "--kill-on-bad-exit=1", *_options(job, nodes, name), *program]

    slurm.report(
        f"{counted(nodes, 'node')} and this machine measure {folder} by a step of srun, which may wait "
        f"{start_s:g} s in the queue. Ctrl-C cancels it."
    )
    step = _Step(command, job, nodes)
    try:
        step.start(start_s, limit_s + _ANSWER_S)
        return measure(folder, step, name=socket.gethostname(), limit_s=limit_s)
    except TimeoutError as error:
        raise _not_started(name, start_s, slurm) from error
    finally:
        step.end()
        # SLURM may have queued the step although srun was killed before it got SLURM's answer.
        with suppress(SlurmError):
            slurm.query(["scancel", f"--user={os.getuid()}", f"--name={name}"])


def _options(job: Job, nodes: int, name: str) -> list[str]:
    """Return the options of srun: the options of the job, with little time and few resources."""
    resources = replace(
        job.resources,
        nodes=nodes,
        spare_nodes=0,
        # Some partitions take only jobs that ask for GPUs; one GPU starts sooner than all.
        gpus_per_node=min(1, job.resources.gpus_per_node),
        cpus_per_node=1,
        mem_gb=_MEM_GB if job.resources.mem_gb is not None else None,
        time_limit_min=_TIME_LIMIT_MIN,
    )
    small = replace(job, run_name=name, resources=resources, policy=replace(job.policy, signal_lead_s=1))
    options = {**sbatch_options(small), **srun_options(small)}
    return [_argument(key, value) for key, value in options.items() if key not in _OF_BATCH]


def _argument(name: str, value: Option) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _not_started(name: str, start_s: float, slurm: SlurmClient) -> SlurmError:
    """Return the error of a step that still waits in the queue, with SLURM's reason."""
    reason = ""
    with suppress(SlurmError):
        reason = slurm.query(["squeue", "--noheader", f"--user={os.getuid()}", f"--name={name}", "-o", "%r"])
    why, _ = explain(reason.strip(), run="RUN", job_id="JOB")
    return SlurmError(
        f"The step that measures the files has not started within {start_s:g} s: {why}. It is cancelled.",
        hint="Run the command again when nodes are free, or name a cluster file with another partition.",
    )


class _Step:
    """The connection of this machine (host 0) to the tasks that an srun step runs on the nodes."""

    index = 0

    def __init__(self, command: Sequence[str], job: Job, nodes: int) -> None:
        self.count = nodes + 1
        self._timeout_s = 0.0
        self._runs = False
        """Whether the tasks have begun; before that, only a signal ends srun."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._values: queue.Queue[tuple[int, Any] | None] = queue.Queue()
        try:
            self._srun = subprocess.Popen(
                command,
                cwd=job.project_dir,
                env={**scrub(os.environ), **job.cluster.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
                # Ctrl-C goes to this process alone, which then ends srun.
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise SlurmError(
                f"srun can't be started: {error.strerror}.", hint="Type this command on a login node."
            ) from error
        self._stdin = cast("IO[str]", self._srun.stdin)
        self._receiver = threading.Thread(target=self._receive, name="slurmddp-srun", daemon=True)
        self._receiver.start()

    def start(self, start_s: float, timeout_s: float) -> None:
        """Wait until all tasks of the step run.

        Args:
            start_s: seconds to wait.
            timeout_s: seconds for each later answer of the tasks.

        Raises:
            TimeoutError: the tasks don't run within `start_s` seconds.
            SlurmError: srun has ended.
        """
        self._timeout_s = timeout_s
        first_values = self._collect(start_s)
        self._runs = True
        self._send([None, *first_values])

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from each task, send the values of all hosts to the tasks, and return them."""
        try:
            values = [value, *self._collect(self._timeout_s)]
        except TimeoutError as error:
            raise SlurmddpError(
                f"A node has not taken the next step within {self._timeout_s:g} s.",
                hint="Its file system may hang: look at the mount of the folder on the nodes.",
            ) from error

        self._send(values)
        return values

    def end(self) -> None:
        """End srun and its step."""
        # A task exits by itself when its standard input ends.
        with suppress(OSError):
            self._stdin.close()
        # A step that waits in the queue has no task yet: at SIGTERM srun cancels it.
        if not self._runs:
            self._srun.terminate()
        try:
            self._srun.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()
        self._receiver.join(_END_S)
        self._errors.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        """Return a value of each task, in order; raise TimeoutError if a value does not come in time."""
        deadline = time.monotonic() + timeout_s
        values: dict[int, Any] = {}
        while len(values) < self.count - 1:
            try:
                received = self._values.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if received is None:
                raise self._ended()
            task, value = received
            values[task] = value

        return [values[task] for task in sorted(values)]

    def _send(self, values: list[Any]) -> None:
        try:
            print(json.dumps(values), file=self._stdin, flush=True)
        except OSError:
            raise self._ended() from None

    def _receive(self) -> None:
        """Read srun's output until it ends, and put the values of the tasks into the queue for `_collect`."""
        with cast("IO[str]", self._srun.stdout) as stdout:
            for line in stdout:
                _, mark, text = line.partition(_MARK)
                if mark:
                    self._values.put(json.loads(text))

        self._values.put(None)

    def _ended(self) -> SlurmError:
        """Return the error for an srun that has ended too early, with the last line that gives its reason."""
        code = self._srun.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip() and not _ROUTINE.search(line)]
        reason = lines[-1] if lines else f"exit code {code}"
        return SlurmError(
            f"srun failed: {reason.rstrip('.')}.",
            hint="The nodes need the Python of the cluster file (`python:`, `setup:`) with slurmddp, and the "
            "project at the path that it has on this machine.",
        )


class _Task:
    """The connection of a task, which the srun step runs on a node, to the machine that started the step."""

    def __init__(self) -> None:
        self.index = int(os.environ["SLURM_PROCID"]) + 1
        self.count = int(os.environ["SLURM_NTASKS"]) + 1

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each host; raise SlurmddpError if the machine that started the step has left."""
        print(f"{_MARK}{json.dumps([self.index, value])}", flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SlurmddpError("The machine that started this step has left.")

        values: list[Any] = json.loads(line)
        return values


def main(argv: Sequence[str]) -> int:
    """Measure the file system as one task of the step; return the exit code.

    Args:
        argv: the folder, and the seconds to wait for a change of another host.
    """
    folder, limit_s = argv
    hosts = _Task()
    try:
        hosts.gather(None)
        measure(Path(folder), hosts, name=socket.gethostname(), limit_s=float(limit_s))
    except SlurmddpError as error:
        # Print the error without a traceback: the machine that started the step raises it, too.
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
