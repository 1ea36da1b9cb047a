"""The table of decisions after an attempt; Python's `decide` and the batch script's shell are held to it.

Each row: a label, what is given to `slurmddp.launchers.outcome.decide`, and the (outcome, next) expected.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    label: str
    exit_code: int
    outcome: str
    next: str
    failures: int = 0
    max_restarts: int = 3
    progressed: bool = False
    cancelled: bool = False
    requeue: bool = True
    stalls: int = 0
    without_progress: int = 0
    progressed_before: bool = False

    @property
    def given(self) -> dict[str, int | bool]:
        return {
            "exit_code": self.exit_code,
            "failures": self.failures,
            "max_restarts": self.max_restarts,
            "progressed": self.progressed,
            "cancelled": self.cancelled,
            "requeue": self.requeue,
            "stalls": self.stalls,
            "without_progress": self.without_progress,
            "progressed_before": self.progressed_before,
        }


TABLE = (
    Row("finished", 0, "finished", "none", progressed=True),
    Row("finished without a checkpoint", 0, "finished", "none"),
    Row("finished although cancelled", 0, "finished", "none", cancelled=True),
    Row("finished after failures", 0, "finished", "none", failures=3, progressed=True),
    Row("configuration", 78, "config", "none"),
    Row("configuration after progress", 78, "config", "none", failures=1, progressed=True),
    Row("configuration of a cancelled run", 78, "config", "none", cancelled=True),
    Row("no progress", 79, "no_progress", "none"),
    Row("no progress of a cancelled run", 79, "no_progress", "none", cancelled=True),
    Row("stopped", 75, "stopped", "requeue", progressed=True),
    Row("stopped before its first checkpoint", 75, "stopped", "requeue"),
    Row("stopped after many failures", 75, "stopped", "requeue", failures=9, progressed=True),
    Row("stopped with no restarts allowed", 75, "stopped", "requeue", max_restarts=0, progressed=True),
    Row("stopped and must not requeue", 75, "stopped", "none", progressed=True, requeue=False),
    Row("stopped because cancelled", 75, "cancelled", "none", progressed=True, cancelled=True),
    Row("stopped once at the step it began with", 75, "stopped", "requeue", stalls=1),
    Row("stopped twice at the step it began with", 75, "no_progress", "none", stalls=2),
    Row("stopped twice and must not requeue", 75, "stopped", "none", stalls=2, requeue=False),
    Row("stopped twice because cancelled", 75, "cancelled", "none", stalls=2, cancelled=True),
    Row("third time limit without progress", 75, "stopped", "requeue", without_progress=3),
    Row("fourth time limit without progress", 75, "no_progress", "none", without_progress=4),
    Row(
        "fourth time limit without progress of a stopped run",
        75,
        "stopped",
        "none",
        without_progress=4,
        requeue=False,
    ),
    Row(
        "fourth time limit without progress of a cancelled run",
        75,
        "cancelled",
        "none",
        without_progress=4,
        cancelled=True,
    ),
    Row("first failure", 1, "failed", "requeue", failures=1, progressed=True),
    Row("last failure allowed", 1, "failed", "requeue", failures=3, progressed=True),
    Row("one failure too many", 1, "failed", "none", failures=4, progressed=True),
    Row("failure without progress", 1, "failed", "none", failures=1),
    Row(
        "failure without progress after progress", 1, "failed", "requeue", failures=1, progressed_before=True
    ),
    Row(
        "killed without progress after progress", 137, "failed", "requeue", failures=3, progressed_before=True
    ),
    Row("one failure too many after progress", 1, "failed", "none", failures=4, progressed_before=True),
    Row(
        "stopped twice at one step after progress",
        75,
        "no_progress",
        "none",
        stalls=2,
        progressed_before=True,
    ),
    Row("failure with no restarts allowed", 1, "failed", "none", failures=1, max_restarts=0, progressed=True),
    Row("failure and must not requeue", 1, "failed", "none", failures=1, progressed=True, requeue=False),
    Row("failure of a cancelled run", 1, "cancelled", "none", failures=1, progressed=True, cancelled=True),
    Row("killed", 137, "failed", "requeue", failures=1, progressed=True),
    Row("killed without progress", 137, "failed", "none", failures=1),
    Row("killed by scancel", 137, "cancelled", "none", failures=1, progressed=True, cancelled=True),
    Row("terminated", 143, "failed", "requeue", failures=2, progressed=True),
    Row("out of memory as srun says it", 253, "failed", "requeue", failures=1, progressed=True),
    Row("a node was not fit", 76, "failed", "requeue", failures=1),
    Row("too many nodes were not fit", 76, "failed", "none", failures=4),
    Row("a node was not fit and must not requeue", 76, "failed", "none", failures=1, requeue=False),
    Row("a node was not fit for a cancelled run", 76, "cancelled", "none", failures=1, cancelled=True),
    Row("usage error", 2, "failed", "none", failures=1),
)

PROGRESS = (
    ("", "step-0000000009", True),
    ("", "step-0", False),
    ("step-0000000200", "step-0000000300", True),
    ("step-0000000200", "step-0000000200", False),
    ("step-0000000200", "step-0000000100", False),  # the newest checkpoint was damaged and set aside
    ("step-0000000200", "", False),
    ("step-9", "step-10", True),
    ("step-08", "step-09", True),
    ("step-5", "nonsense", False),
)
"""The `latest` file before and after an attempt, and whether the change is progress."""
