"""Find the rank that holds up the others, from the step, the phase and the Python stack of each rank.

When ranks hang, nearly all wait in a collective. The stuck rank does something else, or is in another
collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import slurmddp
from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.watchdog.hang import Watchdog
from slurmddp.launchers.watchdog.stacks import RankStacks
from slurmddp.runs.failures.kinds import PHRASES, Cause, FailureKind

_WAITS_IN = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/slurmddp/training/process_group/rendezvous.py",
)
_STOP = "/slurmddp/training/stopping/agreement.py"
_END_OF_GROUP = (" in destroy_process_group", " in _shutdown_backend")
_BACKWARD = "_engine_run_backward"
_OWN = f"{Path(slurmddp.__file__).parent}/"
_LIBRARIES = ("/torch/", "/lib/python3", "<frozen ")
_AT_WORK = 0.5
"""A rank with a heartbeat within this part of the stuck rank's limit makes progress."""
_DOING = {
    "starting": "starting",
    "meeting": "waiting for other ranks to come",
    "loading": "loading model, data or checkpoint",
    "saving": "saving",
    "evaluating": "evaluating",
    "data": "waiting for data",
    "first_step": "in its first step",
    "step": "in its step",
    "ending": "ending",
}
"""Phases in the order in which a loop goes through them after the same completed step, each in words."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The state of one rank of a job that may hang."""

    rank: int
    host: str
    phase: str
    step: int
    """The last completed step; -1 before the first."""
    seconds: float
    """Seconds without a heartbeat."""
    limit_s: float | None
    """Seconds that it may go without a heartbeat; None: no limit."""
    state: str = ""
    """The kernel's letter: R runs, S sleeps, D hangs in the kernel, T is stopped, t is being debugged."""
    stack: tuple[str, ...] = ()
    """`path:line in function` of the main thread, innermost first; empty if the rank did not answer."""
    worker: tuple[str, ...] = ()
    """The stack of a loader worker that is fetching data."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankReport:
        report = cls(**values)
        return replace(report, stack=tuple(report.stack), worker=tuple(report.worker))


def reports(
    watchdog: Watchdog, beats: Mapping[int, RankHeartbeat], stacks: Mapping[int, RankStacks], host: str
) -> list[RankReport]:
    """Return the reports of this node's ranks, in order; `stacks` as a finished `StackRequest` gives them."""
    found = []
    for rank, beat in sorted(beats.items()):
        own = stacks.get(rank, RankStacks())
        found.append(
            RankReport(
                rank=rank,
                host=host,
                phase=beat.phase,
                step=beat.step,
                seconds=round(watchdog.silent_s(rank, beat), 1),
                limit_s=watchdog.limit_s(beat),
                state=own.state,
                stack=own.stack,
                worker=own.worker,
            )
        )
    return found


def first_stopped(found: Sequence[RankReport]) -> RankReport | None:
    """Return the rank that holds up all ranks of the job, or None if the job makes progress after all.

    It makes progress as long as the rank that the others wait for shows heartbeats, need not show any, or is
    held by a debugger.
    """
    if not found:
        return None
    first = min(found, key=_order_among(found))
    if first.limit_s is None or first.seconds < first.limit_s:
        return None
    at_work = [
        one
        for one in found
        if one.limit_s is None or one.seconds < min(one.limit_s, _AT_WORK * first.limit_s) or one.state == "t"
    ]
    return None if at_work else first


def _order_among(found: Sequence[RankReport]) -> Any:
    """Return a sort key by which the rank that stopped first comes first."""
    places = Counter(place(one) for one in found)

    def order(one: RankReport) -> tuple[Any, ...]:
        return (
            one.state != "T",
            waits(one),
            one.step,
            list(_DOING).index(one.phase),
            one.state != "R",
            places[place(one)],
            _lines_in_common(one, found),
            one.rank,
        )

    return order


def waits(one: RankReport) -> bool:
    """Return whether a rank stands where it waits for other ranks."""
    if not one.stack:
        return False
    if one.stack[0].endswith(_BACKWARD) or any(part in one.stack[0] for part in _WAITS_IN):
        return True
    return any(_STOP in frame for frame in one.stack[:4])


def at_exit(one: RankReport) -> bool:
    """Return whether a rank without a heartbeat stands at its exit, not in a collective.

    The end of the process group counts as the exit: torch waits there for its own threads.
    """
    return not waits(one) or any(frame.endswith(_END_OF_GROUP) for frame in one.stack)


def place(one: RankReport) -> str:
    """Return the innermost frame of the person's code, shortened; else slurmddp's, else the innermost."""
    others = [frame for frame in one.stack if not any(part in frame for part in _LIBRARIES)]
    persons = [frame for frame in others if not frame.startswith(_OWN)]
    return _short((persons or others or one.stack or ("",))[0])


def _lines_in_common(one: RankReport, found: Sequence[RankReport]) -> tuple[int, ...]:
    """Return the lines, outermost first, in the functions that all ranks are in; a lower line is behind."""
    stacks = [[_split(frame) for frame in reversed(other.stack)] for other in found if other.stack]
    lines = []
    for depth, (function, line) in enumerate(_split(frame) for frame in reversed(one.stack)):
        if any(len(stack) <= depth or stack[depth][0] != function for stack in stacks):
            break
        lines.append(line)
        if any(stack[depth][1] != line for stack in stacks):
            break
    return tuple(lines)


def _split(frame: str) -> tuple[str, int]:
    """Take `path:line in function` apart into function and line."""
    where, _, function = frame.rpartition(" in ")
    path, _, line = where.rpartition(":")
    return f"{path} {function}", int(line) if line.isdecimal() else 0


def _short(frame: str) -> str:
    where, separator, function = frame.rpartition(" in ")
    return f"{PurePath(where).name}{separator}{function}"


def why(found: Iterable[RankReport], first: RankReport) -> Cause:
    """Return the cause of a failure by `first`: its activity, for how long, the waiting ranks, its stack."""
    others = sorted((one for one in found if one.rank != first.rank), key=lambda one: one.rank)
    kind, text = _does(first)
    text += f" for {first.seconds:.0f} s"
    text += f" (step {first.step + 1})" if first.step >= 0 else ""
    if others:
        text += f", while {_who(others)} {_where(others)}"
    return Cause(kind, text + _stands_at(first))


def hung_at_exit(found: RankReport) -> str:
    """Return the warning that a rank hung at its exit and was ended, and that the others' result stands."""
    stood = f" It stood at {place(found)} (stacks-rank-{found.rank}.txt)." if found.stack else ""
    return (
        f"rank {found.rank} on {found.host} hung at its exit: all other ranks had left, and for "
        f"{found.seconds:.0f} s it used no CPU and read and wrote nothing. Its agent ended it; the result of "
        f"the other ranks stands.{stood}"
    )


def _does(first: RankReport) -> tuple[FailureKind, str]:
    """Return the kind of the failure of a stuck rank, and its activity."""
    if first.state == "T":
        return "stalled", f"{PHRASES['stalled']}: stopped by a signal (SIGSTOP)"
    if waits(first):
        return "stalled_together", f"{PHRASES['stalled_together']}, at {place(first)},"
    return "stalled", f"{PHRASES['stalled']}: {_DOING[first.phase]}"


def _who(others: Sequence[RankReport]) -> str:
    return f"{'rank' if len(others) == 1 else 'ranks'} {_ranges([one.rank for one in others])}"


def _ranges(ranks: Sequence[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _where(others: Sequence[RankReport]) -> str:
    """Return the activity of most of the others, as a verb."""
    verb = "waits" if len(others) == 1 else "wait"
    if all(waits(one) for one in others):
        (where, count), *_ = Counter(place(one) for one in others).most_common()
        return f"{verb} at {where}" if count == len(others) else f"{verb}, most of them at {where}"
    (phase, count), *_ = Counter(one.phase for one in others).most_common()
    doing = f"{'is' if len(others) == 1 else 'are'} {_DOING[phase]}"
    return doing if count == len(others) else f"{doing} (most of them)"


def _stands_at(first: RankReport) -> str:
    text = ""
    if first.worker:
        text += f"; its loader worker stands at {_short(first.worker[0])}"
    elif first.stack and not waits(first):
        text += f"; it stands at {_short(first.stack[0])}"
        own = place(first)
        text += f", called from {own}" if own != _short(first.stack[0]) else ""
    elif not first.stack and first.state != "T":
        text += "; it did not answer when it was asked for its stack"
    if first.state == "D":
        text += "; the kernel holds it (state D), as a rule for a file system that does not answer"
    return text
