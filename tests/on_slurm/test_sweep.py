"""Sweeps on a real SLURM: the points of `slurmddp train -m`, and the jobs of a Hydra application."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support import ROOT
from support.slurm.train_project import SMALL, Command, Run, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

APP = """
import os, pathlib, hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    place = pathlib.Path(HydraConfig.get().runtime.output_dir)
    (place / f"rank-{os.environ['RANK']}").write_text(f"{config.rate} of {os.environ['WORLD_SIZE']}")

main()
"""


def runs_of(command: Command, shown: str) -> list[Run]:
    """Return the runs of the sweep that a command has named, once all have finished."""
    sweep = shown.rpartition("slurmddp list ")[2].split()[0]
    names = [line.split()[0] for line in command("list", sweep).splitlines()[1:]]
    runs = [Run(command.project / "runs" / name, command) for name in names]
    for run in runs:
        run.wait_finished()
    assert command("status", sweep).count(" finished ") == len(runs)
    return runs


def test_points_and_jobs_of_hydra_train_as_runs_of_their_own(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    command = Command(project, sandbox.environment())
    (project / "app.py").write_text(APP)
    words = ["app.py", "-m", "hydra/launcher=slurmddp", "hydra.launcher.cluster=sandbox", "+rate=1,2"]
    launched = subprocess.run(
        [sys.executable, *words, "hydra.launcher.nodes=2", "hydra.launcher.ranks_per_node=1"],
        cwd=project,
        env={**command.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert launched.returncode == 0, launched.stdout + launched.stderr
    sweep = ["train", "-m", "+cluster=sandbox", *SMALL, "train.steps=3", "seed=1,2", "nodes=1"]
    points = runs_of(command, command(*sweep))
    assert len({run.job_id for run in points}) == 2 and all(run.steps() == 3 for run in points)
    assert points[0].losses() != points[1].losses()
    assert command(*sweep).count("is finished") == 2
    jobs = runs_of(command, launched.stdout)
    for rate, run in enumerate(jobs, 1):
        written = {file.name: file.read_text() for file in (run.folder / "hydra").glob("rank-*")}
        assert written == {"rank-0": f"{rate} of 2", "rank-1": f"{rate} of 2"}
