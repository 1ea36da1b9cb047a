"""Compute how long a job may run, and when a rank must exit before SLURM kills it; pure.

The batch step queries SLURM once and passes the limits on in environment variables. A rank does not query
SLURM, because its container may lack scontrol, and a thousand queries would load slurmctld.
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
"""Seconds to keep free between the end of the save and SIGKILL: ranks exit, the batch step requeues the job.

If KillWait is short, half of it is kept free instead.
"""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """The time limits of this job; None means that a limit is unknown."""

    end_time: float | None = None
    """The end of the job, in seconds since the epoch."""
    lead_s: float = 120.0
    """Seconds from SIGUSR2 to the end of the job (`policy.signal_lead_s`)."""
    kill_wait_s: float | None = None
    """Seconds from SIGTERM to SIGKILL."""
    preempt_grace_s: float = 0.0
    """Additional seconds before SIGKILL if the job is preempted."""


def read_limits(environ: Mapping[str, str]) -> TimeLimits:
    """Return the time limits from the variables that the batch step has set."""
    lead = _seconds(environ, LEAD_VARIABLE)
    if lead is None:
        lead = TimeLimits.lead_s

    # If the batch step could not query the end, SLURM 23.02 and later set SLURM_JOB_END_TIME.
    end_time = _seconds(environ, END_TIME_VARIABLE) or _seconds(environ, "SLURM_JOB_END_TIME")
    return TimeLimits(
        end_time=end_time,
        lead_s=lead,
        kill_wait_s=_seconds(environ, KILL_WAIT_VARIABLE),
        preempt_grace_s=_seconds(environ, PREEMPT_GRACE_VARIABLE) or 0.0,
    )


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    """Return a variable as a number of seconds; None if it is unset or not a whole number."""
    text = environ.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() else None


def leave_at(limits: TimeLimits, terminated: float | None, share: float = 1.0) -> float | None:
    """Return the time at which a rank should exit, just before SIGKILL.

    SLURM adds the grace time only at a preemption. Any other SIGTERM before the time limit ends the job for
    good or requeues it, so that a time after SIGKILL does no harm.

    Args:
        limits: the limits of the job.
        terminated: the time of SIGTERM, in seconds since the epoch; None without a SIGTERM.
        share: the fraction of `RESERVE_S` to keep free.

    Returns:
        Seconds since the epoch; None without a SIGTERM, or if KillWait is not known.
    """
    if limits.kill_wait_s is None or terminated is None:
        return None

    killed = terminated + limits.kill_wait_s
    is_at_limit = limits.end_time is not None and terminated >= limits.end_time - 1
    if not is_at_limit:
        # A SIGTERM before the time limit may be a preemption, which adds the grace time.
        killed += limits.preempt_grace_s
        # SLURM ends the job at its time limit even within the grace time.
        if limits.end_time is not None:
            killed = min(killed, limits.end_time + limits.kill_wait_s)
    return killed - share * min(RESERVE_S, limits.kill_wait_s / 2)
