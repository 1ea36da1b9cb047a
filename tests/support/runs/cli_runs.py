"""Records of the batch step, for tests of the commands that read them."""

from __future__ import annotations


def submit(folder, job_id="7"):
    folder.add_event("submitted", job_id=job_id, submitter="sbatch")


def start(folder, attempt=0, job_id="7"):
    folder.log_dir(attempt).mkdir(parents=True)
    folder.add_event(
        "started", attempt=attempt, job_id=job_id, restart_count=attempt, nodes="node[1-2]", launcher="slurm"
    )


def end(folder, outcome, attempt=0, code=0, next_="none"):
    folder.add_event("ended", attempt=attempt, job_id="7", exit_code=code, outcome=outcome, next=next_)
