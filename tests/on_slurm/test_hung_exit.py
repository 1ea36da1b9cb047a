"""A rank that hangs at its exit on one node does not hold the job, on a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SCRIPT = """
import atexit, os, threading
import torch.distributed as dist

def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    atexit.register(hang)
"""


def test_the_result_of_the_other_ranks_stands(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "hangs.py").write_text(SCRIPT)
    command = Command(project, sandbox.environment())
    run = command.submit(
        "hang", "nodes=2", "ranks_per_node=1", "program.script=hangs.py", "policy.stall_timeout_s=3"
    )
    run.wait("end", lambda: run.events("ended"))
    (end,) = run.events("ended")
    assert (end["exit_code"], end["outcome"], end["next"]) == (0, "finished", "none")
    assert "rank 1 on " in (told := command("status", run.folder.name))
    assert "hung at its exit" in told
