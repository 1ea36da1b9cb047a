"""The Python environment of the ranks, copied to the disk of the nodes on a real SLURM."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, Run, make_project

pytestmark = pytest.mark.slurm

SHOW = "import sys; print('runs in', sys.prefix, sys.executable)"


def test_the_ranks_run_in_the_copy_which_two_nodes_of_one_disk_make_once(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    environment, disk = tmp_path / "venv", tmp_path / "disk"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # torch stays where it is, as an editable install does.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "elsewhere.pth").write_text("".join(lines))
    disk.mkdir()
    project = make_project(tmp_path / "project")
    (project / "show.py").write_text(SHOW)
    own = ["nodes=2", "ranks_per_node=1", f"cluster.python={environment}/bin/python", f"cluster.stage={disk}"]
    run: Run = Command(project, sandbox.environment()).submit("show", "program.script=show.py", *own)
    run.wait("end", lambda: run.events("ended"))
    assert run.events("ended")[0]["outcome"] == "finished", run.story()
    # The ranks of this script never meet, which is noted.
    assert {event["about"] for event in run.events("warned")} <= {"ranks"}
    (copy,) = (path for path in disk.glob("*/*") if path.is_dir())
    logs = run.folder / "logs" / "attempt-0"
    for rank in range(2):
        assert f"runs in {copy} {copy}/bin/python" in (logs / f"rank-{rank}.log").read_text()
    told = "".join((logs / f"node-{node}.log").read_text() for node in range(2))
    assert told.count(f"{environment} was copied to {copy}") == 1
