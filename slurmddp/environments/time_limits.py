"""Compute how long a job may run, and when a rank must leave before SLURM kills it; pure.

The batch step asks SLURM once and hands the answers down in the environment. A rank does not ask, because its
container may have no scontrol, and a thousand requests would load the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.environments.names import (
    END_TIME_VARIABLE,
    KILL_WAIT_VARIABLE,
    LEAD_VARIABLE,
    PREEMPT_GRACE_VARIABLE,
)

RESERVE_S = 5.0
"""Seconds kept free after the save: the ranks agree and leave, and the batch step requeues the job.

At most half of KillWait is kept free.
"""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """The time limits of this job; None means not known."""

    end_time: float | None = None
    """The end of the job, in seconds since the epoch."""
    lead_s: float = 120.0
    """Seconds from SIGUSR2 to the end of the job (`policy.signal_lead_s`)."""
    kill_wait_s: float | None = None
    """Seconds from SIGTERM to SIGKILL."""
    preempt_grace_s: float = 0.0
    """Further seconds before SIGKILL if the job is preempted."""


def read_limits(environ: Mapping[str, str]) -> TimeLimits:
    """Return the limits that the batch step found. SLURM itself sets SLURM_JOB_END_TIME from 23.02 on."""
    lead = _seconds(environ, LEAD_VARIABLE)
    return TimeLimits(
        end_time=_seconds(environ, END_TIME_VARIABLE) or _seconds(environ, "SLURM_JOB_END_TIME"),
        lead_s=TimeLimits.lead_s if lead is None else lead,
        kill_wait_s=_seconds(environ, KILL_WAIT_VARIABLE),
        preempt_grace_s=_seconds(environ, PREEMPT_GRACE_VARIABLE) or 0.0,
    )


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() else None


def leave_at(limits: TimeLimits, terminated: float | None, share: float = 1.0) -> float | None:
    """Return the time at which a rank should leave, just before SIGKILL.

    SLURM adds the preemption grace only at a preemption. Other senders of SIGTERM before the end either end
    the job for good or requeue it, so a later time does no harm there.

    Args:
        limits: the limits of the job.
        terminated: the time of SIGTERM, in seconds since the epoch; None if no SIGTERM has come.
        share: the part of `RESERVE_S` to keep free.

    Returns:
        Seconds since the epoch; None if the time is not known.
    """
    if limits.kill_wait_s is None or terminated is None:
        return None
    is_over = limits.end_time is not None and terminated >= limits.end_time - 1
    killed = terminated + limits.kill_wait_s + (0.0 if is_over else limits.preempt_grace_s)
    if limits.end_time is not None and not is_over:
        killed = min(killed, limits.end_time + limits.kill_wait_s)
    return killed - share * min(RESERVE_S, limits.kill_wait_s / 2)
