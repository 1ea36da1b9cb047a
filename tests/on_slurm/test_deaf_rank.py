"""A rank that ignores every stop signal leaves the batch script the time to requeue, on a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
time.sleep(1000)
"""


def test_the_batch_script_tells_of_the_end_before_slurm_kills_it(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "deaf.py").write_text(DEAF)
    command = Command(project, sandbox.environment())
    run = command.submit(
        "deaf",
        "nodes=2",
        "ranks_per_node=1",
        "program.script=deaf.py",
        "time_limit=1",
        "policy.signal_lead_s=10",
    )
    run.wait("end", lambda: run.events("ended"))
    assert (run.events("ended")[0]["exit_code"], run.events("ended")[0]["next"]) == (75, "requeue")
    run.wait("job that is put back", lambda: run.events("ended")[0] and run.command.slurm("squeue", "-h"))
    command("cancel", run.folder.name, code=None)
