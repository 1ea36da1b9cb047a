"""Read the state of a run, and further facts from its records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from slurmddp.control.listing import Listing, list_runs
from slurmddp.errors import SlurmddpError
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.excluded_nodes import excluded_nodes
from slurmddp.runs.folder.history import RecordedAttempt, fold, how_ended, of_newest_attempt
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.goodput import Goodput, read_goodput
from slurmddp.runs.report.start_phases import Phases, newest_phases
from slurmddp.runs.status import merged_logs, run_status
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.runs.status.curve_viewers import curve_commands
from slurmddp.runs.status.notices import Notice, notices
from slurmddp.runs.status.peak_memory import PeakMemory, newest_peak_memory
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.slurm import client
from slurmddp.slurm.client import SlurmClient

_LAST_LINES = 6
"""Number of last lines of each log that are shown for an end without a failed rank."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """The start, the nodes and the end of an attempt of a run."""

    number: int
    started: float | None
    """Time of the start, in seconds since the epoch."""
    nodes: str | None
    ended: str
    """A phrase about the end of the attempt, such as its outcome; empty if it has not ended."""


@dataclass(frozen=True, kw_only=True)
class RunDetails(RunStatus):
    """The status of a run, and details from its run folder: attempts, goodput, memory, warnings."""

    time: float
    """Time at which the state was read, in seconds since the epoch."""
    goodput: Goodput = field(default_factory=Goodput)
    phases: Phases | None = None
    """The durations of the phases of the newest start; None before its first step."""
    best: BestStep | None = None
    """The best checkpoint, by `train.best`."""
    memory: PeakMemory | None = None
    """The peak memory of the ranks of the newest attempt."""
    notices: tuple[Notice, ...] = ()
    """Hangs, slow ranks, changed nodes and warnings of the newest attempt."""
    history: tuple[AttemptFacts, ...] = ()
    """All attempts, the oldest first."""
    awaited: str = ""
    """The nodes for which the other nodes wait before the ranks start; empty if they wait for none."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes that the next attempt avoids because they failed recently."""
    last_lines: tuple[str, ...] = ()
    """The last lines of agents and batch script, if the run failed or was lost without a failed rank."""
    curves: tuple[str, ...] = ()
    """Commands that show the curves that loggers have written."""


def status(
    name: str | None = None, slurm: SlurmClient | None = None, *, write_report: bool = True
) -> RunDetails | Listing:
    """Return the status of a run with details, or the statuses of the runs of a sweep.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder; None: the newest run.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.
        write_report: whether to write the report of a run again if it has finished or failed since then.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
    """
    from slurmddp.runs.report.html import with_report

    slurm = slurm or SlurmClient()
    if sweeps.find_to_show(name) is not None:
        return list_runs(name, slurm=slurm)

    folder = index.find(name)
    run = run_status.status(folder, slurm)
    return _details(folder, with_report(folder, run) if write_report else run)


def status_of(folder: RunFolder, slurm: SlurmClient | None = None) -> RunStatus:
    """Return the status of a run.

    Args:
        folder: the run folder.
        slurm: the client for queries to SLURM, used only on a machine that has sbatch; None: a new client.
    """
    return run_status.status(folder, (slurm or SlurmClient()) if client.on_path() else None)


def _details(folder: RunFolder, run: RunStatus) -> RunDetails:
    """Return the status of a run together with the details of its folder."""
    now = time.time()
    has_unexplained_end = run.failure is None and run.state in ("failed", "lost")
    return RunDetails(
        **vars(run),
        **_records(folder, run, now),
        time=now,
        best=_best(folder),
        avoided_nodes=tuple(excluded_nodes(folder, now)),
        last_lines=_last_lines(folder) if has_unexplained_end else (),
        curves=tuple(curve_commands(folder)),
    )


def _records(folder: RunFolder, run: RunStatus, now: float) -> dict[str, Any]:
    """Return the fields of `RunDetails` that come from the recorded events of a run.

    If the events are unreadable, the result is empty; `state` and `detail` of the run report it.
    """
    try:
        events = folder.events()
        return {
            "goodput": read_goodput(folder, run, now),
            "phases": newest_phases(events),
            "memory": newest_peak_memory(events),
            "awaited": _awaited(events) if run.state in ("starting", "running") else "",
            "notices": tuple(notices(events)),
            "history": _history(fold(events).attempts),
        }
    except (SlurmddpError, OSError):
        return {}


def _history(attempts: Sequence[RecordedAttempt]) -> tuple[AttemptFacts, ...]:
    """Return the start, the nodes and the end of each attempt; the newest attempt may have no end yet."""
    return tuple(
        AttemptFacts(
            number=attempt.number,
            started=attempt.started,
            nodes=attempt.nodes,
            ended="" if attempt.is_open and attempt is attempts[-1] else how_ended(attempt),
        )
        for attempt in attempts
    )


def _best(folder: RunFolder) -> BestStep | None:
    # An unreadable record is no error here, because `state` and `detail` of the run report it.
    with suppress(SlurmddpError, OSError):
        return best_step(folder)
    return None


def _awaited(events: Iterable[Any]) -> str:
    """Return the nodes for which the agent of node 0 waits in the newest attempt; empty for none."""
    _, newest = of_newest_attempt(events)
    waits = [str(event.get("nodes", "")) for event in newest if event.get("event") == "awaits"]
    return waits[-1] if waits else ""


def _last_lines(folder: RunFolder) -> tuple[str, ...]:
    """Return the last `_LAST_LINES` lines of each agent's log and of the batch script's log.

    The lines are from the newest attempt, each with the label of its log; empty if no attempt has begun.
    """
    attempts = folder.attempts()
    if not attempts:
        return ()

    paths = merged_logs.selected_files(folder, attempts[-1], merged_logs.ChosenLogs(frozenset()))
    return tuple(
        f"[{merged_logs.label(path)}] {line}"
        for path in paths
        for line in merged_logs.tail(path, _LAST_LINES)
    )
