"""Find the rank that holds up the other ranks, by the step, phase and Python stack of each rank.

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
"""A rank waits for other ranks if its innermost frame contains one of these paths."""
_STOP = "/slurmddp/training/stopping/agreement.py"
"""The file in which a rank waits for the agreement on a stop."""
_END_OF_GROUP = (" in destroy_process_group", " in _shutdown_backend")
"""Ends of frames in which a rank ends its process group."""
_BACKWARD = "_engine_run_backward"
"""The end of the innermost frame in a backward pass, which waits for the other ranks' gradients."""
_SLURMDDP = f"{Path(slurmddp.__file__).parent}/"
_LIBRARIES = ("/torch/", "/lib/python3", "<frozen ")
_AT_WORK = 0.5
"""A rank with a heartbeat within this part of the stuck rank's limit makes progress."""
_DOING = {
    "starting": "starting",
    "meeting": "waiting for other ranks to join",
    "loading": "loading model, data or checkpoint",
    "saving": "saving",
    "evaluating": "evaluating",
    "data": "waiting for data",
    "first_step": "in its first step",
    "step": "in its step",
    "ending": "ending",
}
"""Phases in the order in which a loop goes through them after a completed step, with phrases for messages."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The phase, the heartbeat and the stack of one rank, collected when a hang is suspected."""

    rank: int
    host: str
    phase: str
    step: int
    """The last completed step; -1 before the first."""
    seconds: float
    """Seconds without a heartbeat."""
    limit_s: float | None
    """Seconds that the rank may go without a heartbeat; None: no limit."""
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
    """Return the reports of this node's ranks, in the order of the ranks.

    Args:
        watchdog: the watchdog of the node, which knows for how long each rank was silent.
        beats: the newest heartbeat of each rank, by global rank.
        stacks: the result of a `StackRequest`.
        host: the node's host name.
    """
    of_node = []
    for rank, beat in sorted(beats.items()):
        answer = stacks.get(rank, RankStacks())
        of_node.append(
            RankReport(
                rank=rank,
                host=host,
                phase=beat.phase,
                step=beat.step,
                seconds=round(watchdog.silent_s(rank, beat), 1),
                limit_s=watchdog.limit_s(beat),
                state=answer.state,
                stack=answer.stack,
                worker=answer.worker,
            )
        )

    return of_node


def first_stopped(all_reports: Sequence[RankReport]) -> RankReport | None:
    """Return the rank that holds up all ranks of the job; None if the job may make progress.

    The job may make progress if the rank for which the other ranks wait is still within its limit, or if any
    rank has a recent heartbeat, has no limit, or is held by a debugger.
    """
    if not all_reports:
        return None

    first = min(all_reports, key=_order_among(all_reports))
    if first.limit_s is None or first.seconds < first.limit_s:
        return None
    if any(_makes_progress(report, _AT_WORK * first.limit_s) for report in all_reports):
        return None
    return first


def _makes_progress(report: RankReport, recent_s: float) -> bool:
    """Return whether a rank may be at work.

    A rank may be at work if it has no limit, is held by a debugger, or had a heartbeat in the last `recent_s`
    seconds and within its limit.
    """
    if report.limit_s is None or report.state == "t":
        return True
    return report.seconds < min(report.limit_s, recent_s)


def _order_among(all_reports: Sequence[RankReport]) -> Any:
    """Return a sort key for reports: the rank that probably holds up the other ranks comes first."""
    places = Counter(place(report) for report in all_reports)

    def order(report: RankReport) -> tuple[Any, ...]:
        return (
            # A rank that a signal has stopped comes first, because it can't continue by itself.
            report.state != "T",
            # A rank that does not wait for other ranks comes before ranks that wait.
            waits(report),
            # A rank that is further behind in steps and phases comes earlier.
            report.step,
            list(_DOING).index(report.phase),
            # A rank that computes comes before sleeping ranks, which may wait for it.
            report.state != "R",
            # A rank at a rarer place in the code comes earlier, because most ranks wait at the same place.
            places[place(report)],
            _lines_in_common(report, all_reports),
            report.rank,
        )

    return order


def waits(report: RankReport) -> bool:
    """Return whether the stack of a rank shows that it waits for other ranks."""
    if not report.stack:
        return False
    if report.stack[0].endswith(_BACKWARD) or any(part in report.stack[0] for part in _WAITS_IN):
        return True

    return any(_STOP in frame for frame in report.stack[:4])


def at_exit(report: RankReport) -> bool:
    """Return whether a rank that shows no heartbeat is at its exit, not in a collective.

    `destroy_process_group` counts as the exit, because torch waits there for its own threads.
    """
    return not waits(report) or any(frame.endswith(_END_OF_GROUP) for frame in report.stack)


def place(report: RankReport) -> str:
    """Return the innermost frame in the program's code, else in slurmddp's, else in a library's.

    The result has the form `file.py:LINE in FUNCTION`; it is empty without a stack.
    """
    frames: Sequence[str] = [frame for frame in report.stack if not any(part in frame for part in _LIBRARIES)]
    users = [frame for frame in frames if not frame.startswith(_SLURMDDP)]
    if users:
        frames = users
    if not frames:
        frames = report.stack
    return _short(frames[0]) if frames else ""


def _lines_in_common(report: RankReport, all_reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Return the line numbers of a rank in the outermost functions that all ranks are in.

    The outermost function comes first. The tuple ends at the first line that differs between ranks. As a sort
    key, it puts the rank at the lowest line first, because that rank is behind the other ranks.
    """
    stacks = [[_split(frame) for frame in reversed(other.stack)] for other in all_reports if other.stack]
    lines = []
    for depth, (function, line) in enumerate(_split(frame) for frame in reversed(report.stack)):
        if any(len(stack) <= depth or stack[depth][0] != function for stack in stacks):
            break

        lines.append(line)
        if any(stack[depth][1] != line for stack in stacks):
            break

    return tuple(lines)


def _split(frame: str) -> tuple[str, int]:
    """Split a frame `path:line in function` into `path function` and the line number (0 without one)."""
    location, _, function = frame.rpartition(" in ")
    path, _, line = location.rpartition(":")
    return f"{path} {function}", int(line) if line.isdecimal() else 0


def _short(frame: str) -> str:
    location, separator, function = frame.rpartition(" in ")
    return f"{PurePath(location).name}{separator}{function}"


def why(all_reports: Iterable[RankReport], first: RankReport) -> Cause:
    """Return the cause of the failure of the stuck rank `first`.

    The text names what the rank does, for how long, which ranks wait, and where in the code the rank is.
    """
    others = sorted(
        (report for report in all_reports if report.rank != first.rank), key=lambda report: report.rank
    )
    kind, text = _does(first)
    text += f" for {first.seconds:.0f} s"
    if first.step >= 0:
        text += f" (step {first.step + 1})"
    if others:
        text += f", while {_subject(others)} {_activity(others)}"

    return Cause(kind, text + _position(first))


def hung_at_exit(report: RankReport) -> str:
    """Return the warning that a rank hung at its exit, and that its agent ended it."""
    position = ""
    if report.stack:
        position = f" It was at {place(report)} (stacks-rank-{report.rank}.txt)."

    return (
        f"rank {report.rank} on {report.host} hung at its exit: all other ranks had ended, and for "
        f"{report.seconds:.0f} s it used no CPU and read and wrote nothing. Its agent ended it; the result "
        f"of the other ranks counts.{position}"
    )


def _does(first: RankReport) -> tuple[FailureKind, str]:
    """Return the kind of a stuck rank's failure, and the phrase that describes what the rank does."""
    if first.state == "T":
        return "stalled", f"{PHRASES['stalled']}: stopped by a signal (SIGSTOP)"
    if waits(first):
        return "stalled_together", f"{PHRASES['stalled_together']}, at {place(first)},"

    return "stalled", f"{PHRASES['stalled']}: {_DOING[first.phase]}"


def _subject(others: Sequence[RankReport]) -> str:
    noun = "rank" if len(others) == 1 else "ranks"
    return f"{noun} {_ranges([report.rank for report in others])}"


def _ranges(ranks: Sequence[int]) -> str:
    """Return sorted rank numbers as ranges: `0-2, 5` for 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][-1] = rank
        else:
            ranges.append([rank, rank])

    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _activity(others: Sequence[RankReport]) -> str:
    """Return what most of the other ranks do, as the predicate of a sentence: `wait at model.py:3 in f`."""
    is_single = len(others) == 1
    if all(waits(report) for report in others):
        verb = "waits" if is_single else "wait"
        (position, count), *_ = Counter(place(report) for report in others).most_common()
        if count < len(others):
            return f"{verb}, most of them at {position}"
        return f"{verb} at {position}"

    verb = "is" if is_single else "are"
    (phase, count), *_ = Counter(report.phase for report in others).most_common()
    if count < len(others):
        return f"{verb} {_DOING[phase]} (most of them)"
    return f"{verb} {_DOING[phase]}"


def _position(first: RankReport) -> str:
    """Return the end of the sentence about a stuck rank: where in the code it is, if that is known."""
    text = ""
    if first.worker:
        text += f"; its loader worker is at {_short(first.worker[0])}"
    elif first.stack and not waits(first):
        innermost = _short(first.stack[0])
        text += f"; it is at {innermost}"
        caller = place(first)
        if caller != innermost:
            text += f", called from {caller}"
    elif not first.stack and first.state != "T":
        text += "; it did not answer when it was asked for its stack"

    if first.state == "D":
        text += "; the kernel keeps it waiting (state D), usually for a file system that does not answer"

    return text
