"""When to stop before SLURM does: pure arithmetic from the job's limits and from measured steps and saves.

The batch step asks SLURM once and hands the answers down in the environment; a rank could not ask: there may
be no scontrol in its container, and a thousand that asked would be too many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

RESERVE_S = 5.0
"""For what is no save: the ranks agree, leave, and the batch script asks for the job to be put back."""
SPREAD = 1.25
"""The next save may take this much longer than the longest so far."""
_REMEMBERED = 32


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What SLURM leaves to this job; None means not known, and so no promise is built on it."""

    end_time: float | None = None
    """When the job's time is over, in seconds since the epoch."""
    lead_s: float = 120.0
    """How long before that SLURM sends USR2 (`policy.signal_lead_s`)."""
    kill_wait_s: float | None = None
    """Between SIGTERM and SIGKILL."""
    preempt_grace_s: float = 0.0
    """How much longer that is when the job is preempted."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How long a step and a save take here."""

    step_s: float = 0.0
    save_s: float | None = None
    """The longest save; None before the first."""


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


def read_limits(environ: Mapping[str, str]) -> Limits:
    """Return what the batch step has found out; SLURM itself tells the end of a job from 23.02 on."""
    lead = _seconds(environ, "SLURMDDP_LEAD_S")
    return Limits(
        end_time=_seconds(environ, "SLURMDDP_END_TIME") or _seconds(environ, "SLURM_JOB_END_TIME"),
        lead_s=Limits.lead_s if lead is None else lead,
        kill_wait_s=_seconds(environ, "SLURMDDP_KILL_WAIT_S"),
        preempt_grace_s=_seconds(environ, "SLURMDDP_PREEMPT_GRACE_S") or 0.0,
    )


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() else None


def last_safe_moment(limits: Limits, measured: Measured) -> float | None:
    """Return when to ask for a stop at the latest, so that steps under way and a save still fit in.

    A save that was never measured is taken to fit into the lead.
    """
    if limits.end_time is None:
        return None
    save_s = limits.lead_s if measured.save_s is None else SPREAD * measured.save_s
    return limits.end_time - RESERVE_S - save_s - 2 * measured.step_s


def leave_at(limits: Limits, terminated: float) -> float | None:
    """Return when a rank that got SIGTERM at `terminated` should leave by itself, just before it is killed.

    Only at a preemption does SLURM add the grace; what else sends SIGTERM before the time is over either
    kills a job that is to end for good or puts it back itself, so the later moment does no harm there.
    """
    if limits.kill_wait_s is None:
        return None
    is_over = limits.end_time is not None and terminated >= limits.end_time - 1
    killed = terminated + limits.kill_wait_s + (0.0 if is_over else limits.preempt_grace_s)
    if limits.end_time is not None and not is_over:
        killed = min(killed, limits.end_time + limits.kill_wait_s)
    return killed - min(RESERVE_S, limits.kill_wait_s / 4)


def shortfalls(limits: Limits, measured: Measured) -> dict[str, str]:
    """Return what is too short for a save of the measured length, as sentences by the name of the limit."""
    found: dict[str, str] = {}
    if measured.save_s is None:
        return found
    needed, takes = SPREAD * measured.save_s + RESERVE_S, f"A save takes {measured.save_s:.0f} s"
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
