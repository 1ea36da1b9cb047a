"""Events of a job of SLURM, at fixed times, and a SLURM that counts the queries about it."""

from __future__ import annotations

from support.slurm.slurm_in_memory import FakeSlurm

SUBMITTED = {"event": "submitted", "time": 100.0, "job_id": "7", "submitter": "sbatch"}
RESUBMITTED = {"event": "submitted", "time": 400.0, "job_id": "8", "submitter": "sbatch"}
FIRST_STEP = {"event": "first_step", "time": 120.0, "attempt": 0, "step": 1}
SAVED = {"event": "saved", "time": 160.0, "attempt": 0, "step": 200, "seconds": 0.1}
CANCELLED = {"event": "cancelled", "time": 300.0, "job_id": "7"}


def started(attempt=0, job_id="7", **more):
    return {
        "event": "started",
        "time": 110.0 + attempt,
        "attempt": attempt,
        "job_id": job_id,
        "launcher": "slurm",
        "nodes": "node[1-2]",
        **more,
    }


def ended(outcome, next_="none", attempt=0, code=0, job_id="7"):
    return {
        "event": "ended",
        "time": 200.0 + attempt,
        "attempt": attempt,
        "job_id": job_id,
        "exit_code": code,
        "outcome": outcome,
        "next": next_,
    }


def signalled(name, attempt=0):
    return {"event": "signalled", "time": 150.0, "attempt": attempt, "signal": name, "rank": 0}


class CountingSlurm(FakeSlurm):
    """Remembers which jobs it was asked for."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def jobs(self, job_ids):
        self.queries.append(list(job_ids))
        return super().jobs(job_ids)
