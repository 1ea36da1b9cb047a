"""When to stop before SLURM does: pure arithmetic from the job's limits and from measured steps and saves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from slurmddp.environments.time_limits import RESERVE_S, Limits

SPREAD = 1.25
"""The next save may take this much longer than the longest so far."""
_REMEMBERED = 32


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How long a step and a save take here."""

    step_s: float = 0.0
    """From one question whether to stop to the next: a step, or a batch of an accumulated one."""
    save_s: float | None = None
    """The longest save, from its begin until it was durable; None before the first."""
    is_writing: bool = False
    """Whether one is still being written, which a stop waits for before it saves."""


class Pace:
    """Collects the durations of steps and saves."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._save_s: float | None = None

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def add_save(self, seconds: float) -> None:
        self._save_s = max(seconds, self._save_s or 0.0)

    @property
    def measured(self) -> Measured:
        """The longest save, and a long step: one in ten is longer (with an evaluation inside, say)."""
        steps = sorted(self._steps)
        return Measured(step_s=steps[int(0.9 * (len(steps) - 1))] if steps else 0.0, save_s=self._save_s)


def last_safe_moment(limits: Limits, measured: Measured) -> float | None:
    """Return when to ask for a stop at the latest, so that steps under way and a save still fit in.

    A save that was never measured is taken to fit into the lead.
    """
    if limits.end_time is None:
        return None
    save_s = limits.lead_s if measured.save_s is None else SPREAD * measured.save_s
    return limits.end_time - RESERVE_S - save_s * (2 if measured.is_writing else 1) - 2 * measured.step_s


def shortfalls(limits: Limits, measured: Measured) -> dict[str, str]:
    """Return what is too short for a save of the measured length, as sentences by the name of the limit."""
    found: dict[str, str] = {}
    if measured.save_s is None:
        return found
    needed = SPREAD * measured.save_s + RESERVE_S
    duration = f"{measured.save_s:.2g}" if measured.save_s < 9.5 else f"{measured.save_s:.0f}"
    takes = f"A save takes {duration} s, and {math.ceil(needed)} s are needed to be safe"
    if needed > limits.lead_s:
        found["lead"] = (
            f"{takes}; policy.signal_lead_s leaves {limits.lead_s:.0f} s before the time limit. "
            + (
                f"Say policy.signal_lead_s={needed + 60:.0f}."
                if limits.end_time is None
                else "The training stops earlier by itself."
            )
        )
    grace = (limits.kill_wait_s or 0.0) + limits.preempt_grace_s
    if limits.kill_wait_s is not None and needed > grace:
        found["grace"] = (
            f"{takes}; SLURM kills {grace:.0f} s after a preemption's SIGTERM, so what was trained since the "
            "last checkpoint would be lost. Save more often (train.save_every), or ask for a partition with "
            "a longer GraceTime."
        )
    return found
