"""Run a person's script once per device: start the command of this process again, N times.

`Distributon.launch()` in a plain `python script.py` calls this module. The first process trains nothing. It
starts the ranks, watches them, and relays their output: rank 0's as it is, other lines as `[rank 1] ...`. The
ranks have no standard input. If a rank fails, the others end within two seconds, and the failure is printed.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from slurmddp import errors
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import LAUNCH_ID_VARIABLE, LAUNCHER_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, GOOD_CODES, ConfigError
from slurmddp.host import process as linux
from slurmddp.host.ports import candidate_ports, listen_as_rank_zero
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.agent.worker_group import WorkerGroup
from slurmddp.launchers.coordinator import messages as msg
from slurmddp.launchers.coordinator.coordinator import Coordinator
from slurmddp.launchers.coordinator.recorder import Record
from slurmddp.launchers.coordinator.restart_policy import rules_of
from slurmddp.launchers.local.launcher import Launcher
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, describe

_KILL_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for the ranks that outlive a failed one."""
_TOGETHER_S = 0.3
"""Seconds before that SIGTERM for ranks to end by themselves that fail together with another one."""
_TICK_S, _SOON_S = 1.0, 0.05
FAULTHANDLER_VARIABLE = "PYTHONFAULTHANDLER"
"""With it, Python writes its stack when compiled code crashes."""
_TAIL_BYTES = 64 * 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


def launch_script(num_devices: int, launcher: Launcher) -> NoReturn:
    """Run this program `num_devices` times as the ranks 0..N-1 of one job, then exit with their code."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "launch() was called in a thread, which gets no signals.",
            hint="Call it in the main thread, before anything else is set up.",
        )
    main = sys.modules["__main__"]
    command = rerun_command(sys.orig_argv, sys.argv[0], getattr(main, "__file__", None), hasattr(sys, "ps1"))
    sys.exit(run_ranks(*of_hydra_job(command, sys.modules), num_devices, launcher))


def run_ranks(command: Sequence[str], folder: str | None, num_devices: int, launcher: Launcher) -> int:
    """Run `command` in `folder` as the ranks 0..N-1 of one job; return their common exit code.

    None as the folder stands for this process's folder.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    launch_id = secrets.token_hex(8)
    node = RankInfo(environment="local", launch_id=launch_id)
    with listen_as_rank_zero(node, candidate_ports(f"{launch_id} master")) as probe:
        master = probe.getsockname()[:2]
    ranks = [rank_variables(os.environ, rank, num_devices, launch_id, master) for rank in range(num_devices)]
    return launcher.run(command, ranks, folder)


def rerun_command(
    orig_argv: Sequence[str], argv0: str, main_file: str | None, interactive: bool
) -> list[str]:
    """Return the command that starts the running program again, arguments and interpreter options intact."""
    # Python calls the file of a program on the standard input "<stdin>". Its ranks could not read it again.
    if interactive or (main_file in (None, "<stdin>") and "-c" not in orig_argv):
        raise ConfigError(
            "launch() has to start this program again, but it was typed into an interpreter, a notebook or "
            "the standard input.",
            hint="Put it into a file and run that, use launch(function), or num_devices=1 here.",
        )
    command = [sys.executable, *orig_argv[1:]]
    # A script given by a relative path is another file, or none, once the program has changed its folder.
    if main_file is not None and argv0 in command and Path(argv0).resolve() != Path(main_file).resolve():
        command[command.index(argv0)] = main_file
    return command


def of_hydra_job(command: Sequence[str], modules: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the command and the folder with which ranks repeat this job of a Hydra app.

    Each start of a Hydra app makes an output folder named by the time. The ranks use the first process's
    folder and write no second copy of its configuration.

    Args:
        command: the command that starts the program again.
        modules: the imported modules by name.

    Returns:
        The command with two more overrides, and the folder in which the app was started. Of a program that
        is no Hydra app: its command and None.

    Raises:
        ConfigError: the job is one of a sweep, which would end with the exit of its first job.
    """
    found = getattr(modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if found is None or not found.initialized():
        return list(command), None
    config = found.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise ConfigError(
            "launch() was called in a sweep of Hydra, and would end it with the first job's exit code.",
            hint="Use launch(function), which returns, or start each job of the sweep by its own command.",
        )
    # In Hydra's grammar, backslashes before a quote are doubled, and the quote gets one more.
    output = re.sub(r"(\\*)(')", r"\1\1\\\2", config.runtime.output_dir)
    more = [f"hydra.run.dir='{output}'", "hydra.output_subdir=null"]
    # Hydra accepts its overrides in one piece only, and options may stand after them.
    typed = modules["omegaconf"].OmegaConf.to_container(config.overrides, resolve=False)
    given = {*typed["task"], *typed["hydra"]}
    places = [place for place, word in enumerate(command, 1) if word in given]
    end = places[-1] if places else len(command)
    return [*command[:end], *more, *command[end:]], config.runtime.cwd


def rank_variables(
    environ: Mapping[str, str], rank: int, num_devices: int, launch_id: str, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of one rank; `master` is where ranks on plain torch meet."""
    values = dict(environ)
    if rank > 0:
        values.setdefault("PYTHONUNBUFFERED", "1")  # Into a pipe, Python would write by the block.
    values.setdefault(FAULTHANDLER_VARIABLE, "1")
    values |= rank_environment(RankInfo(environment="local"), rank, num_devices)
    values |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return values | {LAUNCHER_VARIABLE: "local", LAUNCH_ID_VARIABLE: launch_id}


class Relay:
    """One output stream of one rank: relayed as it comes, its end kept for the report of a failure."""

    def __init__(self, source: IO[bytes], target: int, prefix: str) -> None:
        self.source = source
        self.tail = b""
        self._target = target
        self._prefix = prefix.encode()
        self._line = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Relay the new output; return False once the rank has closed the stream."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.source.fileno(), _TAIL_BYTES):
                self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
                self._relay(chunk)
            return False
        return True

    def _relay(self, chunk: bytes) -> None:
        if not self._prefix:
            return self._write(chunk)
        *lines, self._line = (self._line + chunk).split(b"\n")
        # A progress bar redraws its line: only the last state is worth a line here.
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :]
        if len(self._line) > _TAIL_BYTES:  # The time for a line without an end would grow with its square.
            lines.append(self._line)
            self._line = b""
        self._write(b"".join(self._prefix + line[line.rfind(b"\r", 0, -1) + 1 :] + b"\n" for line in lines))

    def close(self) -> None:
        """Relay a last line that has no end."""
        self.pump()
        if self._line:
            self._write(self._prefix + self._line + b"\n")
        self.source.close()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # The reader of the output may be gone; the training continues.
            while data:
                data = data[os.write(self._target, data) :]


class ScriptWorkers(WorkerGroup):
    """The same command as every rank, with its output relayed."""

    def __init__(
        self,
        command: Sequence[str],
        ranks: Sequence[Mapping[str, str]],
        labelled: Container[int],
        stdin: int,
        folder: str | None,
        selector: selectors.BaseSelector,
    ) -> None:
        super().__init__(len(ranks))
        self._command, self._ranks, self._labelled = list(command), ranks, labelled
        self._stdin, self._folder, self._selector = stdin, folder, selector
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._relays: dict[int, list[Relay]] = {}

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one."""
        return int(self._ranks[local_rank]["RANK"])

    def _start(self, local_rank: int, order: msg.StartWorkers) -> int:
        rank = self.rank(local_rank)
        labelled = rank in self._labelled
        process = linux.start_bound(
            self._command,
            signal.SIGKILL,
            cwd=self._folder,
            env=self._ranks[local_rank],
            stdin=subprocess.DEVNULL if rank else self._stdin,
            stdout=subprocess.PIPE if labelled else None,
            stderr=subprocess.PIPE,
        )
        prefix = f"[rank {rank}] " if labelled else ""
        streams = ((process.stdout, 1), (process.stderr, 2))
        self._processes[process.pid] = process
        self._relays[local_rank] = [Relay(stream, target, prefix) for stream, target in streams if stream]
        for relay in self._relays[local_rank]:
            self._selector.register(relay.source, selectors.EVENT_READ, relay)
        return process.pid

    def _exit_code(self, pid: int) -> int | None:
        return self._processes[pid].poll()

    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        errors = self._relays[local_rank][-1]
        errors.pump()
        return partial(capture.tail_of, errors.tail.decode("utf-8", errors="replace"))

    def close(self, *, kill: bool) -> None:
        """Wait for every rank; `kill` ends them before, and the processes that they have started."""
        for pid, process in self._processes.items():
            if kill or process.poll() is None:
                linux.signal_group(pid, signal.SIGKILL)  # Data loader workers are in the group as well.
            process.wait()
        for relay in (relay for relays in self._relays.values() for relay in relays):
            relay.close()


class _Cause(Record):
    """Keeps the failure that ended a run."""

    cause: Failure | None = None

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        self.cause = cause


class ScriptRun:
    """One command as every rank, from the start of the ranks to their common exit code.

    Args:
        command: the words of the command.
        ranks: the environment of each rank.
        labelled: the ranks whose lines begin with `[rank N]`; the others write as they are.
        stdin: the descriptor that rank 0 reads; other ranks have no standard input.
        folder: the working folder of the ranks; None: this process's folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: Sequence[Mapping[str, str]],
        labelled: Container[int],
        stdin: int = subprocess.DEVNULL,
        folder: str | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._num_devices = len(ranks)
        self._workers = ScriptWorkers(command, ranks, labelled, stdin, folder, self._selector)
        self._record = _Cause()
        rules = rules_of({"ranks_per_node": len(ranks), "policy": {"max_restarts_in_place": 0}}, 1)
        now = time.monotonic()
        self._coordinator = Coordinator(rules, ["localhost"], self._record, now)
        self._stopped_by: signal.Signals | None = None
        self._terminate_at = self._kill_at = math.inf
        self._is_over = False

    def run(self) -> int:
        """Start all ranks and return their common exit code; no process that they started is left."""
        try:
            with SignalInbox((*_FORWARDED, signal.SIGCHLD)) as inbox:
                self._selector.register(inbox, selectors.EVENT_READ)
                self._turn(inbox)
                while not self._is_over or self._workers:
                    self._wait()
                    self._turn(inbox)
        finally:
            self._workers.close(kill=self._record.cause is not None or self._stopped_by is not None)
            self._selector.close()
        return self._conclude()

    def _turn(self, inbox: SignalInbox) -> None:
        """Handle signals, exits and deadlines."""
        for received in inbox.read():
            if received != signal.SIGCHLD:
                self._forward(received)
        self._reap()
        now = time.monotonic()
        self._coordinator.poll(now)
        while self._coordinator.orders:
            self._obey(self._coordinator.orders.pop(0)[1])
        if now >= self._terminate_at:
            self._workers.signal(signal.SIGTERM)
            self._terminate_at = math.inf
        if now >= self._kill_at:
            self._workers.kill()

    def _wait(self) -> None:
        """Wait for output, a signal or a deadline, and relay the output."""
        soon = min(self._coordinator.next_deadline, self._terminate_at, self._kill_at) < math.inf
        for key, _ in self._selector.select(_SOON_S if soon else _TICK_S):
            if key.data is not None and not key.data.pump():
                self._selector.unregister(key.fileobj)

    def _reap(self) -> None:
        """Report the ranks that have ended to the coordinator."""
        ran, failures = bool(self._workers), self._workers.poll()
        left, now = tuple(self._workers.left), time.monotonic()
        # A rank that fails after a request to stop has not caused the end.
        if failures and self._stopped_by is None:
            report = msg.WorkersFailed(restart_count=0, left=left, failures=tuple(failures))
            self._coordinator.receive(0, report, now)
        if ran and not self._workers:
            self._coordinator.receive(0, msg.WorkersDone(restart_count=0, left=left, code=EXIT_FINISHED), now)

    def _obey(self, order: msg.Order) -> None:
        match order:
            case msg.StartWorkers():
                self._workers.start(order)
            case msg.Fail():
                self._is_over = True
                self._terminate_at = time.monotonic() + _TOGETHER_S
                self._kill_at = self._terminate_at + _KILL_GRACE_S
            case msg.Leave():
                self._is_over = True

    def _forward(self, received: signal.Signals) -> None:
        if self._stopped_by is not None and received == signal.SIGINT:
            self._workers.kill()
        else:
            self._workers.signal(received)
        self._stopped_by = self._stopped_by or received

    def _conclude(self) -> int:
        if (found := self._record.cause) is not None:
            lines = "".join(f"\n    {line}" for line in found.last_lines)
            said = " Its last lines:" + lines if lines else ""
            print(f"slurmddp: {describe(found)}{said}", file=sys.stderr, flush=True)
            by_signal = 128 + signal.Signals[found.signal] if found.signal else EXIT_FAILED
            return found.exit_code or by_signal
        code = errors.combine_exit_codes(self._workers.codes)
        was_killed = len(self._workers.codes) < self._num_devices
        if self._stopped_by is not None and (was_killed or code not in GOOD_CODES):
            return 128 + self._stopped_by
        return code
