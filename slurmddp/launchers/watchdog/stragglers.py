"""Which rank is slower than the others, told from what each measures for itself, without a word between them.

In data parallel training all ranks take as long as the slowest, since they wait for it in the backward pass.
So what is compared is the time until then, which no other rank lengthens: the wait for data, and the forward
pass, on a GPU by its own clock (`training/heartbeat.py`). That shows slow storage, a slow GPU, and a busy or
throttled CPU. It does not show what is slow in the backward pass or in the optimizer alone, nor, where the
forward pass waits for other ranks (DDP does that for the buffers of a model, such as batch norm's), which of
them it waited for; waits for data are told apart even then. A loop that does not call `Distributon.backward`
has its waits for data compared and nothing else.

A line says where there is something to be done: a rank whose time is above the median of all ranks by a
fifth, and by a twentieth of the step. It comes at most every half minute; a line about the pace comes every
ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurmddp.host.heartbeat_page import Beat

LINE_EVERY_S = 30.0
PACE_EVERY_S = 600.0
_ABOVE_MEDIAN = 1.2
_OF_THE_STEP = 0.05
_FEWEST_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far a rank has come, and in what time: sums since its start."""

    host: str
    step: int
    steps: int
    step_s: float
    wait_s: float
    forward_s: float

    @classmethod
    def of(cls, beat: Beat, host: str) -> Pace:
        return cls(
            host=host,
            step=beat.step,
            steps=beat.steps,
            step_s=round(beat.step_s, 4),
            wait_s=round(beat.wait_s, 4),
            forward_s=round(beat.forward_s, 4),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Pace:
        return cls(**values)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for in every step."""

    rank: int
    host: str
    line: str


@dataclass(frozen=True)
class _Mean:
    """One rank's seconds per step since the last line."""

    rank: int
    host: str
    step: float
    wait: float
    forward: float

    @property
    def own(self) -> float:
        return self.wait + self.forward


def straggler(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> Straggler | None:
    """Return the rank that holds the others up, if one does; both mappings go by rank."""
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
    """Whether there were steps enough in between to compare the ranks by."""
    return len(_means(now, before)) == len(now)


def _means(now: Mapping[int, Pace], before: Mapping[int, Pace]) -> list[_Mean]:
    """Return the means of ranks that have taken enough steps; one that began again counts from there."""
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
    """Return the lower median, without an import of `statistics`, which delays each start."""
    found = sorted(values)
    return found[(len(found) - 1) // 2]


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
