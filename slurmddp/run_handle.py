"""Handles of runs that exist: their state, their logs and their results, here or behind a login node.

run = slurmddp.Run("gpt")
print(run.status().step, run.logs())
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slurmddp.control.ssh import runs
from slurmddp.errors import LoginNodeError, RunNotFoundError, SlurmddpError
from slurmddp.runs import index, ssh_runs
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, read_own, refuse_foreign
from slurmddp.runs.ssh_runs import SshRun
from slurmddp.runs.status import logs
from slurmddp.settings.spec import FUNCTION_CALL

if TYPE_CHECKING:
    from slurmddp.control.cancel import CancelledRun
    from slurmddp.control.stop import StoppedRun
    from slurmddp.runs.status.run_status import RunStatus

log = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_S = 0.2
"""Seconds between two looks at a run folder."""
_LONGEST_PAUSE_S = 30.0
"""Seconds between two questions to a login node, at most; the first ones follow faster."""


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
        return object.__new__(cls if ssh_runs.find(str(name)) is None else RunOverSsh)

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
        from slurmddp.control.status import status_of

        self._refuse_removed()
        return status_of(self._folder)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has ended, over all preemptions and requeues, and its report is written.

        SLURM is asked at most twice a minute.

        Args:
            timeout_s: the longest wait in seconds; None: without end.

        Returns:
            The state of the run: finished, stopped, failed, cancelled or lost.

        Raises:
            TimeoutError: the run has not ended in time. It continues.
            RunNotFoundError: the run was removed meanwhile.
        """
        from slurmddp.runs.report.html import with_report

        return with_report(self._folder, self._ended(timeout_s))

    def _ended(self, timeout_s: float | None) -> RunStatus:
        """Wait until the run has ended, without its report."""
        from slurmddp.runs.status.run_end import end_of
        from slurmddp.slurm.client import SlurmClient

        end = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = end_of(self._folder, SlurmClient())
        while not has_ended():
            self._refuse_removed()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s; it continues.")
            time.sleep(POLL_S)
        return self.status()

    def _refuse_removed(self) -> None:
        """Raise RunNotFoundError if the run folder was removed, or moved away, since this handle was made."""
        try:
            self._folder.config_file.stat()
        except FileNotFoundError as error:
            raise RunNotFoundError(
                f"{self.path} was removed by another command or program.",
                hint="`slurmddp list` shows the runs that exist.",
            ) from error
        except OSError:  # A network file system that fails for a moment.
            pass

    def done(self) -> bool:
        """Return whether the run has ended, in whatever state."""
        return not self.status().active

    def exception(self, timeout_s: float | None = None) -> SlurmddpError | None:
        """Wait for the end of the run, and return the error that `result` raises; None if it finished.

        Args:
            timeout_s: the longest wait in seconds; None: without end.

        Raises:
            TimeoutError: the run has not ended in time. It continues.
        """
        found = self._ended(timeout_s)
        if found.state == "finished":
            return None
        lines = found.failure.telling_lines(12) if found.failure else ()
        reason = found.failure.sentence if found.failure else found.detail
        return SlurmddpError(f"{self.name} did not finish ({found.state}): {reason}", hint="\n".join(lines))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the run, and return what the function returned on rank 0.

        Args:
            timeout_s: the longest wait in seconds; None: without end.

        Returns:
            The value; None if the run is no function.

        Raises:
            TimeoutError: the run has not ended in time. It continues.
            SlurmddpError: the run did not finish; the hint holds the last lines of the rank that failed. Or
                its result is lost, or may be of another account.
        """
        if (error := self.exception(timeout_s)) is not None:
            raise error
        json_file, pickle_file = RunFolder.plain_result_file, RunFolder.result_file
        plain, pickled, config = self._contents(json_file, pickle_file, RunFolder.config_file)
        if plain is not None:
            return self._load(json.loads, plain, json_file)
        if pickled is not None:
            return self._load(pickle.loads, pickled, pickle_file)
        if _is_function(config):
            raise SlurmddpError(
                f"{self.name} has finished, and its folder holds no result.",
                hint="`slurmddp.submit(..., again=True)` calls the function once more.",
            )
        return None

    def _load(self, load: Callable[[bytes], Any], content: bytes, name: Path) -> Any:
        """Return the value in the content of a file; raises SlurmddpError if it holds none."""
        try:
            return load(content)
        except Exception as error:  # A pickle imports classes, and runs their code.
            raise SlurmddpError(
                f"{self.path / name} ({len(content)} bytes) holds no value that this Python can read: "
                f"{type(error).__name__}: {error}.",
                hint="`slurmddp.submit(..., again=True)` calls the function once more.",
            ) from error

    def _contents(self, *names: Path) -> list[bytes | None]:
        """Return the contents of files of the run folder, None for a missing one.

        Raises:
            ConfigError: another account owns such a file or can write into it: a pickle could run anything.
            SlurmddpError: such a file can't be read, or is no file.
        """
        refuse_foreign(self.path, READ_ONLY)
        return [read_own(self.path / name) for name in names]

    def logs(self, rank: int = 0) -> str:
        """Return the log of a rank of the newest attempt; if it is empty, those of nodes and batch script."""
        self._refuse_removed()
        attempts = self._folder.attempts()
        chosen = logs.ChosenLogs(frozenset({rank}))
        return "\n".join(logs.snapshot(self._folder, attempts[-1], chosen, None)) if attempts else ""

    def stop(self) -> StoppedRun:
        """Let the run save and stop, as `slurmddp stop` does.

        Returns:
            What became of the run: its `outcome` is "asked", "dequeued" (it waited, and stays stopped), or
            "inactive" (it had nothing to stop).

        Raises:
            ConfigError: another account owns the run.
        """
        from slurmddp.control.stop import stop

        (stopped,) = self._act(stop).runs
        return stopped

    def cancel(self) -> CancelledRun:
        """End the run, as `slurmddp cancel` does.

        Returns:
            What became of the run: whether it is `cancelled`, and its `jobs` or its `process`.

        Raises:
            ConfigError: another account owns the run.
            SlurmError: the run is marked as cancelled, but SLURM did not cancel its jobs.
        """
        from slurmddp.control.cancel import cancel

        (cancelled,) = self._act(cancel).runs
        return cancelled

    def _act(self, action: Callable[[str], Result]) -> Result:
        """Change the run by an action of `slurmddp.control`."""
        return action(str(self.path))


class RunOverSsh(Run):
    """A run that was submitted over ssh: each call asks its login node.

    `Run(name)` gives one where the name means such a run. Its `path` is HOST:FOLDER. Each method raises
    LoginNodeError if the host can't be reached; `wait` goes on waiting.
    """

    def __new__(cls, name: str | Path | SshRun) -> RunOverSsh:
        return object.__new__(cls)

    def __init__(self, name: str | Path | SshRun) -> None:
        found = name if isinstance(name, SshRun) else ssh_runs.find(str(name))
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
        from slurmddp.control.ssh.statuses import status_over_ssh

        return status_over_ssh(self._run)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        from slurmddp.control.report import report

        status = self._ended(timeout_s)
        if status.state in ("finished", "failed"):
            with suppress(SlurmddpError):  # An error of the report must not hide the status.
                return replace(status, report=runs.call(self._run, report, self.name).path)
        return status

    def _ended(self, timeout_s: float | None) -> RunStatus:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause = 1.0
        has_warned = False
        while True:
            try:
                if not (found := self.status()).active:
                    return found
            except LoginNodeError as error:  # The job does not need the connection.
                if not has_warned:
                    log.warning("%s is asked again until it answers: %s", self._run.host, error)
                has_warned = True
            if time.monotonic() + pause > end:
                raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s; it continues.")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _contents(self, *names: Path) -> list[bytes | None]:
        folder = str(self.path).removeprefix(f"{self._run.host}:")
        return runs.own_files(self._run, [f"{folder}/{name}" for name in names], unshared=True)

    def logs(self, rank: int = 0) -> str:
        from slurmddp.control.logs import logs

        return "\n".join(runs.call(self._run, logs, self.name, ranks=[rank], lines=None).lines)

    def _act(self, action: Callable[[str], Result]) -> Result:
        return runs.call(self._run, action, self.name, changes=True)


def _is_function(config: bytes | None) -> bool:
    """Return whether a run calls a function, by its `config.yaml`; True if that is lost as well."""
    import yaml

    try:
        settings = yaml.safe_load(config or b"")
        return bool(settings["program"]["script"] == FUNCTION_CALL)
    except (yaml.YAMLError, TypeError, KeyError):
        return config is None
