"""Events of a job of SLURM, at fixed times, and a SLURM that counts the queries about it."""

from __future__ import annotations

from support.runs import run_events
from support.runs.run_events import event, saved, submitted
from support.slurm.slurm_in_memory import FakeSlurm

SUBMITTED = submitted(100.0, submitter="sbatch")
RESUBMITTED = submitted(400.0, "8", submitter="sbatch")
FIRST_STEP = event("first_step", 120.0, 0, step=1)
SAVED = saved(160.0, 200, seconds=0.1)
CANCELLED = event("cancelled", 300.0, job_id="7")


def started(attempt=0, job_id="7", **more):
    return run_events.started(110.0 + attempt, attempt, job_id) | {"nodes": "node[1-2]"} | more


def ended(outcome, next_="none", attempt=0, code=0, job_id="7"):
    return run_events.ended(200.0 + attempt, outcome, attempt, next_, job_id) | {"exit_code": code}


REQUEUED = ended("stopped", "requeue", code=75)


def signalled(name, attempt=0):
    return event("signalled", 150.0, attempt, signal=name, rank=0)


class CountingSlurm(FakeSlurm):
    """Records the jobs of its queries."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def jobs(self, job_ids):
        self.queries.append(list(job_ids))
        return super().jobs(job_ids)
