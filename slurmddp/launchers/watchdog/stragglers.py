"""Find the rank that is slower than the others, from the times that each rank measures without the others.

In data parallel training all ranks take as long as the slowest, since they wait for it in the backward pass.
So the time until the backward pass is compared: the wait for data and the forward pass, on a GPU by the GPU's
clock (`training/heartbeat.py`). It shows slow storage, a slow GPU, and a busy or throttled CPU.

It does not show a slow backward pass or optimizer. If the forward pass waits for other ranks, as DDP does for
batch norm's buffers, only the waits for data can be measured. The same holds for a loop that does not call
`Distributon.backward`.

A rank is slow if its time is above the median of all ranks by a fifth, and by a twentieth of the step. The
line about it comes at most every half minute; a line about the pace comes every ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurmddp.host.heartbeat_page import RankHeartbeat

LINE_EVERY_S = 30.0
PACE_EVERY_S = 600.0
_ABOVE_MEDIAN, _OF_THE_STEP = 1.2, 0.05
_FEWEST_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The last step of a rank, and its seconds and number of steps summed up since its start."""

    host: str
    step: int
    steps: int
    step_s: float
    wait_s: float
    forward_s: float

    @classmethod
    def of(cls, beat: RankHeartbeat, host: str) -> Pace:
        times = {name: round(getattr(beat, name), 4) for name in ("step_s", "wait_s", "forward_s")}
        return cls(host=host, step=beat.step, steps=beat.steps, **times)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for in every step."""

    rank: int
    host: str
    line: str


@dataclass(frozen=True)
class _Mean:
    """The seconds per step of one rank since the last line."""

    rank: int
    host: str
    step: float
    wait: float
    forward: float

    @property
    def own(self) -> float:
        return self.wait + self.forward


def straggler(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> Straggler | None:
    """Return the rank that holds up the others, or None; both mappings go by rank."""
    means = _means(now, before)
    if len(means) < 2 or len(means) < len(now):
        return None
    step = _median(mean.step for mean in means)
    for part, what in (("own", "until its backward pass"), ("wait", "waiting for data")):
        slowest = max(means, key=lambda mean: getattr(mean, part))
        most, usual = getattr(slowest, part), _median(getattr(mean, part) for mean in means)
        if most > _ABOVE_MEDIAN * usual and most - usual > _OF_THE_STEP * step:
            line = f"slowest: rank {slowest.rank} on {slowest.host}, {_s(most)} a step {what}"
            if part == "own":
                line += f" ({_s(slowest.wait)} of it waiting for data)"
            line += f"; median {_s(usual)}, a step takes {_s(step)}"
            return Straggler(slowest.rank, slowest.host, line)
    return None


def pace_line(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> str | None:
    """Return how long steps take and which rank waits the longest for data; None without enough steps."""
    means = _means(now, before)
    if not means:
        return None
    most = max(means, key=lambda mean: mean.wait)
    step, wait = _median(mean.step for mean in means), _median(mean.wait for mean in means)
    return (
        f"step {max(pace.step for pace in now.values())}: {_s(step)} a step, {_s(wait)} of it waiting for "
        f"data (the most: rank {most.rank} on {most.host}, {_s(most.wait)})"
    )


def enough_steps(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> bool:
    """Return whether all ranks have taken enough steps in between to be compared."""
    return len(_means(now, before)) == len(now)


def _means(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> list[_Mean]:
    """Return the means of ranks that have taken enough steps; a restarted rank counts from its restart."""
    found = []
    for rank, pace in sorted(now.items()):
        old = before.get(rank)
        if old is None or old.steps > pace.steps:
            old = Pace(host="", step=0, steps=0, step_s=0.0, wait_s=0.0, forward_s=0.0)
        steps = pace.steps - old.steps
        if steps < _FEWEST_STEPS:
            continue
        found.append(
            _Mean(
                rank,
                pace.host,
                (pace.step_s - old.step_s) / steps,
                (pace.wait_s - old.wait_s) / steps,
                (pace.forward_s - old.forward_s) / steps,
            )
        )
    return found


def _median(values: Iterable[float]) -> float:
    """Return the lower median. The import of `statistics` would delay each start."""
    found = sorted(values)
    return found[(len(found) - 1) // 2]


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
