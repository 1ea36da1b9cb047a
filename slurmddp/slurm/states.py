"""SLURM's names for the states of a job, and how its commands spell them; pure.

https://slurm.schedmd.com/job_state_codes.html lists the names, both of base states and of flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.slurm.job_script import is_of_unread_array, job_name, may_be_of

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States of a job that waits; the job may have run before."""
ACTIVE = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
    | {"POWER_UP_NODE", "UPDATE_DB", "EXPEDITING"}
)
"""States of a job that holds nodes."""
TERMINAL = frozenset(
    {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
    | {"DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}
)
"""States of a job that is over; only a requeue starts it again."""
ALL = PENDING | ACTIVE | TERMINAL
STARTED_BY_A_PERSON = (
    "JobHeld",
    "JobHoldMaxRequeue",
    "job requeued in",
    "launch failed requeued held",
    "launch failure limit exceeded",
    "user env retrieval failed",
    "License request",
    "DependencyNeverSatisfied",
)
"""First words of SLURM's reasons for jobs that wait until a person releases or changes them."""
UNKNOWN = "UNKNOWN"
"""The state of a job for which SLURM reported a state that is not in `ALL`; never treat it as terminal."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of one job and further facts about it, as far as SLURM has shown them."""

    job_id: str
    state: str
    """A state of `ALL`, or `UNKNOWN`."""
    reason: str = ""
    """SLURM's reason why the job waits or ended; empty without a reason."""
    start: str = ""
    """The expected start of a waiting job, by SLURM's clock; empty if not known."""
    nodes: str = ""
    """The nodes of the job, as a host list."""
    exit_code: int | None = None
    run: str = ""
    """The run that the token among the script's arguments names; empty without a token."""
    script: str = ""
    """The path of the batch script; empty if not known. The script of an element is in its run folder."""
    error: str = ""
    """The error of sacct, if the state is `UNKNOWN` because squeue has forgotten the job and sacct failed."""

    def may_be_of(self, run: Path) -> bool:
        """Return whether this job may belong to a run, by its token and script: SLURM repeats job ids."""
        names = {run.name, job_name(run.name)}
        return may_be_of(names, self.run, self.script) or is_of_unread_array(self.job_id, self.script, run)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def pending(self) -> bool:
        return self.state in PENDING


def parse_state(text: str) -> str:
    """Return the state at the beginning of `CANCELLED by 1000` or `RUNNING,COMPLETING`; else `UNKNOWN`."""
    # The base state comes first, and flags or further words follow it.
    state, *_ = re.split(r"[\s,+]+", text.strip().upper())
    return state if state in ALL else UNKNOWN


def parse_exit(text: str) -> int | None:
    """Return the exit code of SLURM's `code:signal`; None if `text` is something else."""
    match = re.fullmatch(r"\s*(\d+):\d+\s*", text)
    return int(match[1]) if match else None


def parse_start(text: str) -> str:
    """Return a time of SLURM with a blank for the T: `2026-11-22 23:03:10`; empty for `N/A` and `Unknown`."""
    time = text.strip()
    return time.replace("T", " ") if re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+", time) else ""


def clean_reason(text: str) -> str:
    """Return SLURM's reason without the parentheses that squeue prints; empty for words such as `None`."""
    reason = text.strip()
    if reason.startswith("(") and reason.endswith(")"):
        reason = reason[1:-1]
    return "" if reason in {"None", "N/A", "null"} else reason
