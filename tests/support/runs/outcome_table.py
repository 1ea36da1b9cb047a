"""The table of decisions after an attempt, for `batch.requeue_policy` and the whole batch step.

Each row: a label, how the attempt ended, what the attempts before it count, and the (outcome, next) expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.batch.requeue_policy import Counts, End, Policy


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
    """Like the two above, with this attempt counted."""
    progressed_before: bool = False
    fate: str = "running"

    @property
    def ended(self) -> End:
        return End(
            self.exit_code, self.fate, self.progressed, trained=self.stalls > 0, cancelled=self.cancelled
        )

    @property
    def before(self) -> Counts:
        failures, idle = max(0, self.failures - 1), max(0, self.without_progress - 1)
        return Counts(failures, idle, self.progressed_before, {"": self.stalls - 1} if self.stalls else {})

    @property
    def policy(self) -> Policy:
        return Policy(self.requeue, self.max_restarts)


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
    Row("killed by a preemption", 143, "stopped", "requeue", fate="preempted"),
    Row("failed while SLURM put the job back", 1, "stopped", "requeue", fate="requeued"),
    Row("failed as SLURM lost a node", 1, "stopped", "requeue", fate="node_fail"),
    Row("preempted and must not requeue", 143, "stopped", "none", fate="preempted", requeue=False),
    Row("finished though SLURM put the job back", 0, "finished", "none", fate="requeued"),
    Row("stopped by scancel", 75, "cancelled", "none", progressed=True, fate="cancelled"),
    Row("finished before scancel", 0, "finished", "none", fate="cancelled"),
    Row("killed at the time limit", 137, "failed", "none", failures=1, fate="timeout"),
    Row("preemptions are not counted", 75, "stopped", "requeue", without_progress=9, fate="preempted"),
    Row("stopped twice by preemptions in training", 75, "no_progress", "none", stalls=2, fate="preempted"),
)

CODES = (
    # srun's code, recorded failure, common code of the agents, fate, progressed -> code of the attempt
    (0, None, 0, "running", False, 0),
    (75, None, 75, "running", True, 75),
    (143, None, 75, "running", True, 75),
    (1, None, 0, "running", True, 0),  # the kernel killed a process, and another took its place
    (0, None, None, "running", True, None),
    (75, None, None, "running", True, None),
    (1, None, None, "running", True, 1),
    (137, None, None, "running", True, 137),
    (0, 0, None, "running", False, 1),
    (75, 0, 75, "running", False, 1),
    (143, 0, None, "running", False, 143),
    (1, 3, None, "running", False, 1),
    (143, 78, None, "running", False, 78),
    (0, 79, 0, "running", False, 79),
    (137, 76, None, "running", False, 76),
    (137, None, None, "timeout", True, 75),
    (0, None, None, "timeout", True, 75),
    (1, None, None, "timeout", True, 1),
    (137, None, None, "timeout", False, 137),
)
"""The exit code of an attempt; None where an agent is gone without a code, so that SLURM is asked again."""

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
