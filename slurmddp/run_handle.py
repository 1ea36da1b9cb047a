"""Handles of existing runs: their state, logs and results, on this machine or over ssh.

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
from slurmddp.runs.status import merged_logs
from slurmddp.settings.spec import FUNCTION_CALL

if TYPE_CHECKING:
    from slurmddp.control.cancel import CancelledRun
    from slurmddp.control.stop import StoppedRun
    from slurmddp.runs.report.card import RunCard
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.slurm.client import SlurmClient

log = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_S = 0.2
"""Seconds between two checks of a run folder."""
_LONGEST_PAUSE_S = 30.0
"""The longest pause between two queries of a login node, in seconds; the first pauses are shorter."""


class Run:
    """An existing run: its state, its logs and its result.

    Args:
        name: name of a run, the beginning of a name, or a run folder.

    Raises:
        RunNotFoundError: the name matches no run, or several.

    Example:
        run = slurmddp.Run("gpt")
        print(run.status().step)
        run.wait()
    """

    def __new__(cls, name: str | Path) -> Run:
        return object.__new__(cls if ssh_runs.find(str(name)) is None else RunOverSsh)

    def __init__(self, name: str | Path) -> None:
        self._folder = index.find(str(name))

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def _repr_html_(self) -> str:
        """Return the run as HTML, which a notebook shows for a cell that ends with the run."""
        return self._html()

    def _html(self, slurm: SlurmClient | None = None) -> str:
        from slurmddp.runs.report.card import card_html, error_html

        try:
            return card_html(self._card(slurm))
        except SlurmddpError as error:
            return error_html(error)

    def _card(self, slurm: SlurmClient | None) -> RunCard:
        from slurmddp.control.card import card

        self._refuse_removed()
        return card(str(self.path), slurm=slurm)

    @property
    def name(self) -> str:
        """Full name of the run."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """The path of the run folder."""
        return self._folder.path

    def status(self) -> RunStatus:
        """Return the state of the run, as `slurmddp status` shows it.

        Returns:
            The status, with `state`, `detail`, `step`, `loss`, `failure` and further attributes.

        Raises:
            RunNotFoundError: the run was removed after this handle was made.

        Example:
            status = run.status()
            print(status.state, status.step, status.loss)
        """
        from slurmddp.control.status import status_of

        self._refuse_removed()
        return status_of(self._folder)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has ended, across preemptions and requeues, and write its report.

        A notebook shows the state and the loss meanwhile, and updates them in place; nothing is printed
        elsewhere. SLURM is queried at most twice a minute.

        Args:
            timeout_s: the longest wait, in seconds; None: no limit.

        Returns:
            The status of the run; its `state` is finished, stopped, failed, cancelled or lost.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`. It continues.
            RunNotFoundError: the run was removed during the wait.

        Example:
            if run.wait(timeout_s=3600).state == "finished":
                print(run.result())
        """
        from slurmddp.pages.notebook import CellOutput, is_notebook
        from slurmddp.slurm.client import SlurmClient
        from slurmddp.slurm.paced_client import PacedClient

        # The wait and the output share the answers of SLURM, and so the limit of queries.
        slurm = PacedClient() if is_notebook() else SlurmClient()
        output = CellOutput(lambda: self._html(slurm), repr(self))
        status = self._with_report(self._ended(timeout_s, slurm, output.update))
        output.update(at_once=True)
        return status

    def _with_report(self, status: RunStatus) -> RunStatus:
        """Write the report of the ended run, and return `status` with its path."""
        from slurmddp.runs.report.html import with_report

        return with_report(self._folder, status)

    def _ended(
        self,
        timeout_s: float | None,
        slurm: SlurmClient | None = None,
        show: Callable[[], None] = lambda: None,
    ) -> RunStatus:
        """Wait until the run has ended, and return its status; the report is not written.

        Args:
            timeout_s: the longest wait, in seconds; None: no limit.
            slurm: the client for queries to SLURM; None: a new client.
            show: called after each look at the run that found it active.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`. It continues.
            RunNotFoundError: the run was removed meanwhile.
        """
        from slurmddp.runs.status.run_end import end_of
        from slurmddp.slurm.client import SlurmClient

        end = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = end_of(self._folder, slurm or SlurmClient())

        while not has_ended():
            self._refuse_removed()
            show()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s; it continues.")
            time.sleep(POLL_S)

        return self.status()

    def _refuse_removed(self) -> None:
        """Raise RunNotFoundError if the run folder was removed or renamed after this handle was made."""
        try:
            self._folder.config_file.stat()
        except FileNotFoundError as error:
            raise RunNotFoundError(
                f"{self.path} was removed by another command or program.",
                hint="`slurmddp list` lists existing runs.",
            ) from error
        except OSError:
            # A network file system can fail for seconds. Then it is unknown whether the folder was removed,
            # so nothing is raised, and the caller checks again later.
            pass

    def done(self) -> bool:
        """Return whether the run has ended, in any state."""
        return not self.status().active

    def exception(self, timeout_s: float | None = None) -> SlurmddpError | None:
        """Wait for the end of the run, and return the error if it did not finish.

        Args:
            timeout_s: the longest wait, in seconds; None: no limit.

        Returns:
            The error, whose hint contains the last lines of the failed rank; None if the run finished.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`. It continues.
        """
        status = self._ended(timeout_s)
        if status.state == "finished":
            return None

        reason = status.detail
        hint = ""
        if status.failure is not None:
            reason = status.failure.sentence
            hint = "\n".join(status.failure.telling_lines(12))

        return SlurmddpError(f"{self.name} did not finish ({status.state}): {reason}", hint=hint)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the run, and return the return value of its function on rank 0.

        Args:
            timeout_s: the longest wait, in seconds; None: no limit.

        Returns:
            The return value; None if the run calls no function.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`. It continues.
            ConfigError: another account owns the result, or can change it.
            SlurmddpError: the run did not finish, and the hint contains the last lines of the failed rank; or
                the result is missing or can't be read.

        Example:
            score = slurmddp.submit("package.module.evaluate", "weights.safetensors").result()
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error

        json_file = RunFolder.plain_result_file
        pickle_file = RunFolder.result_file
        plain, pickled, config = self._contents(json_file, pickle_file, RunFolder.config_file)
        if plain is not None:
            return self._load(json.loads, plain, json_file)
        if pickled is not None:
            return self._load(pickle.loads, pickled, pickle_file)
        if _is_function(config):
            raise SlurmddpError(
                f"{self.name} has finished, but its folder contains no result.",
                hint="`slurmddp.submit(..., again=True)` calls the function again.",
            )

        return None

    def _load(self, load: Callable[[bytes], Any], content: bytes, name: Path) -> Any:
        """Decode the content of a result file.

        Args:
            load: the decoder for JSON or pickle.
            content: the content of the file.
            name: the path of the file inside the run folder, for the message.

        Raises:
            SlurmddpError: the decoder raised an error.
        """
        try:
            return load(content)
        except Exception as error:
            # Every error is caught, because a pickle imports classes and runs their code.
            raise SlurmddpError(
                f"{self.path / name} ({len(content)} bytes) contains no value that this Python can read: "
                f"{type(error).__name__}: {error}.",
                hint="`slurmddp.submit(..., again=True)` calls the function again.",
            ) from error

    def _contents(self, *names: Path) -> list[bytes | None]:
        """Return the contents of files of the run folder; None for a missing file.

        Raises:
            ConfigError: another account owns a file or can change it. Loading a pickle from such a file could
                run code of the other account.
            SlurmddpError: a file can't be read, or is no regular file.
        """
        refuse_foreign(self.path, READ_ONLY)
        return [read_own(self.path / name) for name in names]

    def logs(self, rank: int = 0) -> str:
        """Return the log of a rank in the newest attempt.

        If the rank has logged nothing, return the logs of the agents and of the batch script instead, which
        may show the reason.

        Args:
            rank: the global rank.

        Returns:
            The lines, each after the name of its log, such as `[rank 0]`; empty if no attempt has begun.

        Raises:
            RunNotFoundError: the run was removed after this handle was made.
        """
        self._refuse_removed()
        attempts = self._folder.attempts()
        if not attempts:
            return ""

        chosen = merged_logs.ChosenLogs(frozenset({rank}))
        return "\n".join(merged_logs.snapshot(self._folder, attempts[-1], chosen, None))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics that the run has logged, step by step.

        Returns:
            For each logged step a dictionary with "step", "attempt", "time", and the values by name, such as
            "loss", "eval_loss" and "lr". A step that was repeated after a restart is listed once.

        Raises:
            RunNotFoundError: the run was removed after this handle was made.

        Example:
            losses = [step["loss"] for step in run.metrics() if "loss" in step]
        """
        from slurmddp.control.metrics import metrics

        self._refuse_removed()
        return [dict(step) for step in self._act(metrics).steps]

    def report(self) -> Path:
        """Write the HTML report of the run in its present state, and return the path of the page.

        Raises:
            ConfigError: another account owns the run.
            RunNotFoundError: the run was removed after this handle was made.
            SlurmddpError: matplotlib is missing, or the report can't be written.
        """
        from slurmddp.control.report import report

        self._refuse_removed()
        return self._act(report).path

    def stop(self) -> StoppedRun:
        """Ask the run to save and stop, as `slurmddp stop` does.

        Returns:
            The result. Its `outcome` is "asked" if the ranks were asked to stop, "dequeued" if the job was
            still waiting for nodes and was removed from the queue, or "inactive" if the run had no job and no
            process.

        Raises:
            ConfigError: another account owns the run.
        """
        from slurmddp.control.stop import stop

        (stopped,) = self._act(stop).runs
        return stopped

    def cancel(self) -> CancelledRun:
        """Cancel the run, as `slurmddp cancel` does.

        Returns:
            The result: `cancelled`, whether the run was cancelled; `jobs`, its jobs in SLURM; `process`, the
            launcher process of a local run.

        Raises:
            ConfigError: another account owns the run.
            SlurmError: SLURM did not cancel the jobs of the run. When they end, they won't be requeued.
        """
        from slurmddp.control.cancel import cancel

        (cancelled,) = self._act(cancel).runs
        return cancelled

    def _act(self, action: Callable[[str], Result]) -> Result:
        """Call an action of `slurmddp.control`, such as `stop`, with this run, and return its result."""
        return action(str(self.path))


class RunOverSsh(Run):
    """A run that was submitted over ssh: each method queries its login node.

    `Run(name)` returns a RunOverSsh if the name matches such a run. Its `path` is HOST:FOLDER. If the host
    can't be reached, `wait` continues to wait, and all other methods raise LoginNodeError.
    """

    def __new__(cls, name: str | Path | SshRun) -> RunOverSsh:
        return object.__new__(cls)

    def __init__(self, name: str | Path | SshRun) -> None:
        run = name if isinstance(name, SshRun) else ssh_runs.find(str(name))
        if run is None:
            raise RunNotFoundError(
                f"No run {str(name)!r} was started over ssh.", hint="`slurmddp list` lists all runs."
            )

        self._run = run

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def path(self) -> Path:
        return self.status().path

    def status(self) -> RunStatus:
        from slurmddp.control.ssh.statuses import status_over_ssh

        return status_over_ssh(self._run)

    def _card(self, slurm: SlurmClient | None) -> RunCard:
        from slurmddp.control.card import card

        return runs.call(self._run, card, self.name)

    def _with_report(self, status: RunStatus) -> RunStatus:
        if status.state in ("finished", "failed"):
            # The error of a report that can't be written is ignored, because the caller needs the status.
            with suppress(SlurmddpError):
                return replace(status, report=self.report())

        return status

    def _refuse_removed(self) -> None:
        # The host refuses a run that it does not have.
        pass

    def _ended(
        self,
        timeout_s: float | None,
        slurm: SlurmClient | None = None,
        show: Callable[[], None] = lambda: None,
    ) -> RunStatus:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause = 1.0
        has_warned = False
        while True:
            try:
                status = self.status()
                if not status.active:
                    return status
                show()
            except LoginNodeError as error:
                # The job does not need the connection, so keep waiting. Warn only at the first failure.
                if not has_warned:
                    log.warning(
                        "%s does not answer; it is queried again until it does: %s", self._run.host, error
                    )
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
    """Return whether a run calls a function.

    Args:
        config: the content of the run's `config.yaml`. None: the file is missing, so the result is True: the
            run may call a function.
    """
    import yaml

    try:
        settings = yaml.safe_load(config or b"")
        return bool(settings["program"]["script"] == FUNCTION_CALL)
    except (yaml.YAMLError, TypeError, KeyError):
        return config is None
