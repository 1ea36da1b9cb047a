"""Records of the batch step, for tests of the commands that read them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys


def submit(folder, job_id="7"):
    folder.add_event("submitted", job_id=job_id, submitter="sbatch")


def start(folder, attempt=0, job_id="7"):
    folder.log_dir(attempt).mkdir(parents=True)
    folder.add_event(
        "started", attempt=attempt, job_id=job_id, restart_count=attempt, nodes="node[1-2]", launcher="slurm"
    )


def start_here(folder, pid, host=None):
    folder.log_dir(0).mkdir(parents=True)
    folder.add_event(
        "started",
        attempt=0,
        job_id="local-1",
        launcher="local",
        pid=pid,
        host=host or socket.gethostname(),
        nodes="here",
    )


@contextlib.contextmanager
def local_process(folder):
    """Yield a process that sleeps and is recorded as the local launcher of a run; it ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start_here(folder, process.pid)
        yield process
    finally:
        process.kill()
        process.wait()


def end(folder, outcome, attempt=0, code=0, next_="none", job_id="7", **facts):
    facts = {"exit_code": code, "outcome": outcome, "next": next_, **facts}
    folder.add_event("ended", attempt=attempt, job_id=job_id, **facts)
