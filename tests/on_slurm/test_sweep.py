"""Sweeps on a real SLURM: the points of `slurmddp train -m`, and the jobs of a Hydra application."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support import ROOT
from support.slurm.train_project import SMALL, UNHURRIED, Command, Run, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

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


def test_jobs_of_hydra_train_as_runs_of_their_own(sandbox: Sandbox, tmp_path: Path) -> None:
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
    jobs = runs_of(command, launched.stdout)
    assert [run.job_id.partition("_")[2] for run in jobs] == ["0", "1"]
    for rate, run in enumerate(jobs, 1):
        written = {file.name: file.read_text() for file in (run.folder / "hydra").glob("rank-*")}
        assert written == {"rank-0": f"{rate} of 2", "rank-1": f"{rate} of 2"}


def test_an_element_of_an_array_is_requeued_alone_and_a_point_that_differs_is_a_job(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    settings = ["name=gpt", "train.steps=30", "array_parallelism=2", "ranks_per_node=1", UNHURRIED]
    sweep = ["train", "-m", "+cluster=sandbox", *SMALL, *settings, "seed=1,2,3", "nodes=1"]
    shown = command(*sweep)
    array = shown.partition("array   ")[2].split()[0]
    names = [run.name for run in sorted((command.project / "runs").glob("gpt-*")) if run.is_dir()]
    runs = {run.job_id: run for run in (Run(command.project / "runs" / name, command) for name in names)}
    assert sorted(runs) == [f"{array}_{index}" for index in range(3)]
    first, last = runs[f"{array}_0"], runs[f"{array}_2"]
    first.wait_step(2)
    assert last.events("started") == []
    command.slurm("scontrol", "requeue", first.job_id)
    assert "array   " not in command(*sweep)
    points = runs_of(command, shown)
    assert all(run.steps() == 30 for run in points) and len({str(run.losses()) for run in points}) == 3
    started = [event["job_id"] for event in first.events("started")]
    assert started == [first.job_id] * 2 and first.events("resumed")[-1]["step"] >= 2
    assert all(len(run.events("started")) == 1 for run in points if run.folder != first.folder)
    assert (first.folder / f"logs/slurm-{first.job_id}.out").exists()
    again = command(*sweep[:-1], "nodes=1,2")
    assert again.count("is finished") == 3 and "(3 jobs on 2 nodes of sandbox each, 2 at once)" in again
    command("cancel", again.rpartition("slurmddp list ")[2].split()[0])


def test_a_search_waits_for_its_runs_and_learns_from_them(sandbox: Sandbox, tmp_path: Path) -> None:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    asked = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2"]
    settings = ["name=gpt", "train.steps=2", "ranks_per_node=1", "optimizer.lr=tag(log,interval(1e-5,1e-1))"]
    search = ["train", "-m", "+cluster=sandbox", *SMALL, *settings, *asked]
    shown = command(*search)
    assert shown.count("array   ") == 1 and "(2 jobs on 1 node" in shown, shown
    results = dict(re.findall(r"^result  (gpt-\w+)  loss (\S+)$", shown, flags=re.M))
    best = min(results, key=lambda name: float(results[name]))
    assert len(results) == 3 and f"best    {best}  optimizer.lr=" in shown
    assert command("list", shown.rpartition("slurmddp list ")[2].strip()).count(" finished ") == 3
    assert command(*search).rpartition("best ")[2] == shown.rpartition("best ")[2]
