"""Compute when to stop before SLURM's kill, from the job's limits and from measured steps and saves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from slurmddp.environments.time_limits import RESERVE_S, TimeLimits

SPREAD = 1.25
"""Safety factor: the next save is assumed to take this multiple of the longest measured save."""
_STEPS = 32
"""How many of the latest steps count for the duration of a step."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The durations of a step and of a save, in seconds."""

    step_s: float = 0.0
    """The time between two calls of `should_stop`."""
    save_s: float | None = None
    """The longest save, from its start until it was durable; None before the first save."""
    is_writing: bool = False
    """Whether an earlier save is still being written; a stop waits for it before its own save."""


class StepDurations:
    """Recorder of the durations of steps and saves, in seconds."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self.add_step = self._steps.append
        self._save_s: float | None = None

    def add_save(self, seconds: float) -> None:
        self._save_s = max(seconds, self._save_s or 0.0)

    @property
    def measured(self) -> Measured:
        """The longest save, and the 90th percentile of the last steps.

        A percentile, because some steps may contain an evaluation.
        """
        if not self._steps:
            return Measured(save_s=self._save_s)

        steps = sorted(self._steps)
        return Measured(step_s=steps[int(0.9 * (len(steps) - 1))], save_s=self._save_s)


def last_safe_moment(limits: TimeLimits, measured: Measured) -> float | None:
    """Return the latest time to request a stop so that two more steps and a save fit before the job's end.

    A save is assumed to take `SPREAD` times the longest measured save; before the first one, `limits.lead_s`.

    Returns:
        Seconds since the epoch; None if the end of the job is unknown.
    """
    if limits.end_time is None:
        return None

    save_s = limits.lead_s if measured.save_s is None else SPREAD * measured.save_s
    saves = 2 if measured.is_writing else 1
    return limits.end_time - RESERVE_S - save_s * saves - 2 * measured.step_s


def shortfalls(limits: TimeLimits, measured: Measured) -> dict[str, str]:
    """Return warnings about limits that are too short for the measured save.

    Returns:
        Texts by limit: "lead" for the time from the stop to the time limit, "grace" for the time from a
        preemption's SIGTERM to SIGKILL. Empty if both suffice, or no save was measured.
    """
    warnings: dict[str, str] = {}
    if measured.save_s is None:
        return warnings

    needed_s = SPREAD * measured.save_s + RESERVE_S
    duration = f"{measured.save_s:.2g}" if measured.save_s < 9.5 else f"{measured.save_s:.0f}"
    takes = f"A save takes {duration} s, and {math.ceil(needed_s)} s are needed to be safe"

    if needed_s > limits.lead_s:
        remedy = "The training stops earlier by itself."
        if limits.end_time is None:
            remedy = f"Set policy.signal_lead_s={needed_s + 60:.0f}."
        warnings["lead"] = (
            f"{takes}; policy.signal_lead_s leaves {limits.lead_s:.0f} s before the time limit. {remedy}"
        )

    grace_s = (limits.kill_wait_s or 0.0) + limits.preempt_grace_s
    if limits.kill_wait_s is not None and needed_s > grace_s:
        warnings["grace"] = (
            f"{takes}; SLURM kills {grace_s:.0f} s after a preemption's SIGTERM, so what was trained since "
            "the last checkpoint would be lost. Save more often (train.save_every), or ask for a partition "
            "(at sites with preempt/qos: a QOS) with a longer GraceTime."
        )

    return warnings
