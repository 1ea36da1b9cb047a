"""Find the rank that is slower than the other ranks, from times in which a rank does not wait for others.

In data parallel training all ranks take as long as the slowest, since they wait for it in the backward pass.
So the time until the backward pass is compared: the wait for data and the forward pass, on a GPU by the GPU's
clock (`training/heartbeat.py`). The comparison shows slow storage, a slow GPU, and a busy or throttled CPU.

The comparison does not show a slow backward pass or optimizer. If the forward pass waits for other ranks, as
DDP does for batch norm's buffers, only the waits for data can be measured. The same holds for a loop that
does not call `Distributon.backward`.

A rank is slow if its time exceeds the median of all ranks by a fifth, and by a twentieth of the step. A
comparison takes place at most every half minute. A line about the pace of all ranks comes every ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from slurmddp.host.heartbeat_page import RankHeartbeat

LINE_EVERY_S = 30.0
"""Seconds between two reports of an agent about the paces of its ranks."""
PACE_EVERY_S = 600.0
"""Seconds between two lines about the same subject: the pace of all ranks, or a straggler."""
_ABOVE_MEDIAN = 1.2
"""The time of a slow rank is more than this multiple of the median of all ranks."""
_OF_THE_STEP = 0.05
"""The time of a slow rank exceeds the median by more than this part of a step's time."""
_FEWEST_STEPS = 5
"""The smallest number of steps whose mean is compared."""
_TIMES = ("step_s", "wait_s", "forward_s")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The last step of a rank, its number of steps since its start, and the seconds that they took.

    `step_s` is the time of whole steps, `wait_s` the wait for data, `forward_s` the forward pass.
    """

    host: str
    step: int
    steps: int
    step_s: float
    wait_s: float
    forward_s: float

    @classmethod
    def of(cls, beat: RankHeartbeat, host: str) -> Pace:
        times = {name: round(getattr(beat, name), 4) for name in _TIMES}
        return cls(host=host, step=beat.step, steps=beat.steps, **times)

    @property
    def own_s(self) -> float:
        """The seconds up to the backward pass of each step, in which the rank waits for no other rank."""
        return self.wait_s + self.forward_s


_BEGIN = Pace(host="", step=0, steps=0, step_s=0.0, wait_s=0.0, forward_s=0.0)


@dataclass(frozen=True)
class Straggler:
    """A rank for which the other ranks wait in every step, with a `line` for the log."""

    rank: int
    host: str
    line: str


def per_step(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> dict[int, Pace]:
    """Return the mean times of one step since `before`, by global rank.

    The result is empty if a rank has taken fewer than `_FEWEST_STEPS` steps since then.

    Args:
        now: the newest sums of each rank.
        before: the sums at the last comparison; a rank without sums counts from its start.
    """
    means = {}
    for rank, pace in now.items():
        old = before.get(rank, _BEGIN)
        # The number of steps fell, so the rank was restarted: count from its restart.
        if old.steps > pace.steps:
            old = _BEGIN

        steps = pace.steps - old.steps
        if steps < _FEWEST_STEPS:
            return {}

        times = {name: (getattr(pace, name) - getattr(old, name)) / steps for name in _TIMES}
        means[rank] = replace(pace, **times)

    return means


def straggler(means: Mapping[int, Pace]) -> Straggler | None:
    """Return the rank that slows down the other ranks, by the mean times of `per_step`; None if no rank does.

    See the module's docstring for the two limits that its time must exceed.
    """
    if len(means) < 2:
        return None

    step_s = _median(mean.step_s for mean in means.values())
    for part, activity in (("own_s", "until its backward pass"), ("wait_s", "waiting for data")):
        times = {rank: getattr(mean, part) for rank, mean in sorted(means.items())}
        rank = max(times, key=times.__getitem__)
        # Compare the waits for data alone as well: a forward pass that waits for other ranks takes the same
        # time on all ranks, and hides the slow one.
        longest_s = times[rank]
        median_s = _median(times.values())
        if longest_s <= _ABOVE_MEDIAN * median_s or longest_s - median_s <= _OF_THE_STEP * step_s:
            continue

        host = means[rank].host
        line = f"slowest: rank {rank} on {host}, {_s(longest_s)} a step {activity}"
        if part == "own_s":
            line += f" ({_s(means[rank].wait_s)} of it waiting for data)"
        return Straggler(rank, host, f"{line}; median {_s(median_s)}, a step takes {_s(step_s)}")

    return None


def pace_line(means: Mapping[int, Pace]) -> str | None:
    """Return a log line with a step's median duration and the rank that waits longest for data.

    The result is None if `means` is empty.
    """
    if not means:
        return None

    step = max(mean.step for mean in means.values())
    step_s = _median(mean.step_s for mean in means.values())
    wait_s = _median(mean.wait_s for mean in means.values())
    rank = max(sorted(means), key=lambda rank: means[rank].wait_s)
    return (
        f"step {step}: {_s(step_s)} a step, {_s(wait_s)} of it waiting for "
        f"data (the most: rank {rank} on {means[rank].host}, {_s(means[rank].wait_s)})"
    )


def _median(values: Iterable[float]) -> float:
    """Return the lower median, without an import of `statistics`, which would delay each start."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _s(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.1f} ms"
