"""What SLURM leaves to a job, and when to leave before it kills: pure, for ranks and agents alike.

The batch step asks SLURM once and hands the answers down in the environment; a rank could not ask: there may
be no scontrol in its container, and a thousand that asked would be too many.
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
"""For all but the save: the ranks agree and leave, and the batch script requeues the job.

At most half of KillWait.
"""


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


def read_limits(environ: Mapping[str, str]) -> Limits:
    """Return what the batch step has found out; SLURM itself tells the end of a job from 23.02 on."""
    lead = _seconds(environ, LEAD_VARIABLE)
    return Limits(
        end_time=_seconds(environ, END_TIME_VARIABLE) or _seconds(environ, "SLURM_JOB_END_TIME"),
        lead_s=Limits.lead_s if lead is None else lead,
        kill_wait_s=_seconds(environ, KILL_WAIT_VARIABLE),
        preempt_grace_s=_seconds(environ, PREEMPT_GRACE_VARIABLE) or 0.0,
    )


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() else None


def leave_at(limits: Limits, terminated: float | None, share: float = 1.0) -> float | None:
    """Return when a rank that got SIGTERM at `terminated` should leave by itself, just before it is killed.

    None where that is not known, or no SIGTERM has come. A smaller `share` of the time kept free gives a
    later moment.

    Only at a preemption does SLURM add the grace; what else sends SIGTERM before the time is over either
    kills a job that is to end for good or puts it back itself, so the later moment does no harm there.
    """
    if limits.kill_wait_s is None or terminated is None:
        return None
    is_over = limits.end_time is not None and terminated >= limits.end_time - 1
    killed = terminated + limits.kill_wait_s + (0.0 if is_over else limits.preempt_grace_s)
    if limits.end_time is not None and not is_over:
        killed = min(killed, limits.end_time + limits.kill_wait_s)
    return killed - share * min(RESERVE_S, limits.kill_wait_s / 2)
