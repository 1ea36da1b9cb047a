"""Start runs from Python, for example from a notebook, and follow them.

    run = slurmddp.train("+cluster=a100x8", nodes=3)
    print(run.status().step, run.logs())
    score = slurmddp.submit("package.module.evaluate", "weights.safetensors", nodes=2).result()
    runs = slurmddp.map_array("package.module.evaluate", files, cluster="a100x8", array_parallelism=8)

A call does what `slurmddp train` or `slurmddp run` does with the same settings: the same call finds the same
run. With `ssh="login1"` it is submitted there. Without a cluster the run trains on this machine, in a process
of its own that outlives the interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmddp.errors import EXIT_FINISHED, ConfigError, LoginNodeError, RunNotFoundError, SlurmddpError
from slurmddp.runs import index, ssh_runs
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status import logs

if TYPE_CHECKING:
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.spec import Job

_POLL_S = 0.2
_LONGEST_PAUSE_S = 30.0
"""Seconds between two questions to a login node, at most; the first ones follow faster."""
_MODULE = "slurmddp.function_call"


class Run:
    """A run that exists: its state, its logs and its result.

    Args:
        name: name, the beginning of a name, or folder.

    Raises:
        RunNotFoundError: there is no such run, or there are several.

    Example:
        slurmddp.Run("gpt").wait()
    """

    def __new__(cls, name: str | Path) -> Run:
        return super().__new__(cls if ssh_runs.find(str(name)) is None else RunOverSsh)

    def __init__(self, name: str | Path) -> None:
        self._folder = index.find(str(name))

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    def status(self) -> RunStatus:
        """Return what `slurmddp status` shows: `state`, `step`, `loss`, `failure` and more."""
        from slurmddp.cli.start_run import status_of

        return status_of(self._folder)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has ended, over all preemptions and requeues.

        SLURM is asked at most twice a minute.

        Args:
            timeout_s: the longest wait in seconds; None: without end.

        Returns:
            The state of the run: finished, stopped, failed, cancelled or lost.

        Raises:
            TimeoutError: the run has not ended in time. It goes on.
        """
        from slurmddp.cli.commands.logs import end_of
        from slurmddp.slurm.client import SlurmClient

        end = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = end_of(self._folder, SlurmClient())
        while not has_ended():
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s; it goes on.")
            time.sleep(_POLL_S)
        return self.status()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the run, and return what the function returned on rank 0.

        Args:
            timeout_s: the longest wait in seconds; None: without end.

        Returns:
            The value; None if the run is no function.

        Raises:
            TimeoutError: the run has not ended in time. It goes on.
            SlurmddpError: the run did not finish; the hint holds the last lines of the rank that failed.
        """
        found = self.wait(timeout_s)
        if found.state != "finished":
            lines = found.failure.telling_lines(12) if found.failure else ()
            reason = found.failure.sentence if found.failure else found.detail
            raise SlurmddpError(
                f"{self.name} did not finish ({found.state}): {reason}", hint="\n".join(lines)
            )
        value = self._pickled()
        return None if value is None else pickle.loads(value)

    def _pickled(self) -> bytes | None:
        refuse_foreign(self.path, READ_ONLY)  # A pickle of another account could run anything.
        file = self._folder.result_file
        return file.read_bytes() if file.is_file() else None

    def logs(self, rank: int = 0) -> str:
        """Return the log of a rank of the newest attempt; if it is empty, those of nodes and batch script."""
        attempts = self._folder.attempts()
        chosen = logs.Selection(frozenset({rank}))
        return "\n".join(logs.snapshot(self._folder, attempts[-1], chosen, None)) if attempts else ""

    def stop(self) -> None:
        """Let the run save and stop, as `slurmddp stop` does."""
        from slurmddp.cli.commands import stop

        stop.run(argparse.Namespace(run=str(self.path)))

    def cancel(self) -> None:
        """End the run, as `slurmddp cancel` does."""
        from slurmddp.cli.commands import cancel

        cancel.run(argparse.Namespace(run=str(self.path)))


class RunOverSsh(Run):
    """A run that was submitted over ssh: each call asks its login node.

    `Run(name)` gives one where the name means such a run. Its `path` is HOST:FOLDER. Each method raises
    LoginNodeError if the host can't be reached; `wait` goes on waiting.
    """

    def __init__(self, name: str | Path) -> None:
        found = ssh_runs.find(str(name))
        if found is None:
            raise RunNotFoundError(
                f"There is no run {str(name)!r} over ssh.", hint="`slurmddp list` lists runs."
            )
        self._run = found

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def path(self) -> Path:
        return self.status().path

    def status(self) -> RunStatus:
        from slurmddp.cli.statuses_over_ssh import status_there

        return status_there(self._run)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause = 1.0
        while True:
            with suppress(LoginNodeError):  # The job does not need the connection.
                if not (found := self.status()).active:
                    return found
            if time.monotonic() + pause > end:
                raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s; it goes on.")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _pickled(self) -> bytes | None:
        from slurmddp.cli.over_ssh import own_file

        there = str(self.path).removeprefix(f"{self._run.host}:")
        return own_file(self._run, str(RunFolder(there).result_file))

    def logs(self, rank: int = 0) -> str:
        return self._answer("logs", "--rank", str(rank), "--lines", "all")

    def stop(self) -> None:
        self._answer("stop")

    def cancel(self) -> None:
        self._answer("cancel")

    def _answer(self, command: str, *flags: str) -> str:
        from slurmddp.cli.over_ssh import answer

        return answer(self._run, command, self.name, *flags)


def train(*overrides: str, again: bool = False, **settings: Any) -> Run:
    """Start the training that `slurmddp train` starts with these settings, and return its run.

    Args:
        overrides: settings as typed in a shell: "+cluster=a100x8", "train.steps=1000".
        again: whether a run that exists is put aside and started again.
        settings: further settings by name: `cluster="a100x8"`, `nodes=3`.

    Returns:
        The run, which is queued, active, or finished already.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.
        LoginNodeError: `ssh=HOST` can't be reached, or can't run this version; nothing was started.

    Example:
        slurmddp.train("train.steps=1000", cluster="a100x8", nodes=3).wait()
    """
    from slurmddp.cli import over_ssh
    from slurmddp.cli.commands import train as command

    words = [*overrides, *_words(settings)]
    if (there := over_ssh.submit(words, again=again)) is not None:
        return Run(f"{there.host}:{there.name}")
    (job,) = command.jobs_of([words])
    if job.launcher == "slurm":
        command.begin(job, again=again)
    else:
        _start_here(job, again=again)
    return Run(job.run_dir)


def submit(function: Callable[..., Any] | str, *arguments: Any, again: bool = False, **settings: Any) -> Run:
    """Call a function as every rank of a run, and return the run; its `result` is rank 0's return value.

    Args:
        function: a function of a module, or its import path. The ranks import it by this path.
        arguments: plain values (numbers, texts, lists, dictionaries), since the run folder keeps them as
            text. The same function with the same arguments and settings is the same run.
        again: whether a run that exists is put aside and started again.
        settings: settings of the run: `cluster="a100x8"`, `nodes=2`, `time_limit="01:00:00"`.

    Returns:
        The run, which is queued, active, or finished already.

    Raises:
        ConfigError: the function can't be imported by its path, an argument is no plain value, or a setting
            is wrong; nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.

    Example:
        slurmddp.submit(package.module.evaluate, "weights.safetensors", nodes=2).result()
    """
    path = _import_path(function)
    return train(*_call(path, arguments), again=again, **{"name": _name(path), **settings})


def map_array(
    function: Callable[..., Any] | str,
    iterable: Iterable[Any],
    *iterables: Iterable[Any],
    again: bool = False,
    **settings: Any,
) -> list[Run]:
    """Call a function once for each set of arguments, and return a run for each call, in this order.

    On a cluster the calls are the elements of a job array, and the prompt comes back at once. Without a
    cluster they run on this machine one after another, and `map_array` returns when all have ended. The runs
    are a sweep: `slurmddp list`, `cancel`, `resume` and `report` take its name, which is printed.

    Args:
        function: a function of a module, or its import path, as for `submit`.
        iterable: the first argument of each call, a plain value as for `submit`.
        iterables: the further arguments, each with as many values as `iterable`.
        again: whether runs that exist are put aside and started again.
        settings: settings of all runs: `cluster="a100x8"`, `nodes=2`. `array_parallelism=8` lets at most 8
            calls run at once.

    Returns:
        The runs. The same arguments are the same run, which is never computed twice.

    Raises:
        ConfigError: the iterables differ in length, the settings name a login node (`ssh`), or as for
            `submit`; nothing was started.
        SlurmError: SLURM is missing, does not answer, or refused.

    Example:
        runs = slurmddp.map_array(package.module.evaluate, ["a.safetensors", "b.safetensors"], [1, 2])
        scores = [run.result() for run in runs]
    """
    from slurmddp.cli import start_sweep
    from slurmddp.cli.commands import train as command
    from slurmddp.config.composition.compose import login_node

    path, columns = _import_path(function), [list(values) for values in (iterable, *iterables)]
    lengths = [len(values) for values in columns]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"The iterables of map_array have different lengths: {', '.join(map(str, lengths))}.",
            hint="Give each argument a value for each call.",
        )
    words = _words({"name": _name(path), **settings})
    if (there := login_node(words, Path.cwd())) is not None:
        raise ConfigError(
            f"map_array does not submit over ssh, and the settings name {there['ssh']}.",
            hint="Call slurmddp.submit for each set of arguments, or call map_array on the login node.",
        )
    jobs = command.jobs_of([*_call(path, arguments), *words] for arguments in zip(*columns, strict=True))
    points = list({job.run_name: job for job in jobs}.values())
    on_slurm = any(job.launcher == "slurm" for job in points)
    begin = partial(command.begin if on_slurm else _finish_here, again=again)
    if points and start_sweep.start(points, begin) != EXIT_FINISHED:
        raise SlurmddpError(
            "Not all calls were started.", hint="The messages say why; the same call starts them."
        )
    return [Run(job.run_dir) for job in jobs]


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as typed in a shell."""
    from slurmddp.config.script_arguments import spelled

    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def _call(path: str, arguments: Sequence[Any]) -> list[str]:
    """Return the settings of a program that calls a function; raises ConfigError if it can't."""
    from slurmddp.cli.commands import run

    try:
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"An argument of {path} can't be kept as text: {error}.",
            hint="Give numbers, texts, lists and dictionaries; give large data as the path of a file.",
        ) from error
    return run.settings_of(["-m", _MODULE, "{run_dir}", path, text])


def _name(path: str) -> str:
    """Return the name of a function's runs."""
    return re.sub(r"\W+", "-", path.rpartition(".")[2])


def _import_path(function: Callable[..., Any] | str) -> str:
    """Return the import path of a function.

    Raises:
        ConfigError: the ranks can't import the function.
    """
    from slurmddp import plugins

    if isinstance(function, str):
        plugins.locate(function, key="The function")
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        raise ConfigError(
            f"{function!r} can't be imported by the ranks: it has no name in a module.",
            hint="Put it into a module (a .py file of the project) and import it from there. "
            "`Distributon.launch(function)` calls any function on this machine.",
        )
    return f"{module}.{name}"


def _finish_here(job: Job, *, again: bool, array: object = None) -> int:
    """Train a run on this machine to its end; return 0, whatever the end was."""
    _start_here(job, again=again)
    Run(job.run_dir).wait()
    return EXIT_FINISHED


def _start_here(job: Job, *, again: bool) -> None:
    """Start `slurmddp train` in a session of its own; return when the run has begun, or needs no start."""
    folder, words = RunFolder(job.run_dir), [*job.overrides, *(["--again"] if again else [])]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurmddp", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=process.wait, daemon=True).start()  # No zombie stays.
        while process.poll() is None and not _has_begun(folder, process.pid):
            time.sleep(_POLL_S / 4)
        if process.returncode and not _has_begun(folder, process.pid):
            said.seek(0)
            raise SlurmddpError(f"The run did not start: {said.read().strip()}")


def _has_begun(folder: RunFolder, pid: int) -> bool:
    newest = read_history(folder).newest if folder.config_file.is_file() else None
    return newest is not None and newest.pid == pid
