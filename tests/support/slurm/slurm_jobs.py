"""Jobs and a SLURM of fake programs, for tests of code that calls SLURM."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmddp.batch.attempt import BatchSettings
from slurmddp.settings.schema import Cluster, PolicySettings
from slurmddp.settings.spec import Job, Program, Resources
from slurmddp.slurm.script import settings

PROGRAMS = Path(__file__).parent / "fake_slurm"

PARTITIONS = (
    "PartitionName=low Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP TotalNodes=4\n"
    "PartitionName=high Default=NO MaxNodes=2 MaxTime=UNLIMITED State=UP TotalNodes=4\n"
    "PartitionName=old Default=NO MaxNodes=UNLIMITED MaxTime=60 State=INACTIVE TotalNodes=1\n"
)


def make_job(cluster: Cluster | None = None, **changes: Any) -> Job:
    """Return a job of two nodes; `changes` go to the first of its parts that has such a field."""
    parts: dict[type, dict[str, Any]] = {Resources: {}, PolicySettings: {}, Job: {}, Cluster: {}}
    for key, value in changes.items():
        owner = next(kind for kind in parts if key in kind.__dataclass_fields__)
        parts[owner][key] = value

    site = replace(cluster or Cluster(name="here"), **parts[Cluster])
    values: dict[str, Any] = {
        "name": "gpt",
        "run_name": "gpt-0123abcd",
        "run_dir": Path("/home/ada/project/runs/gpt-0123abcd"),
        "project_dir": Path("/home/ada/project"),
        "launcher": "slurm",
        "submitter": "sbatch",
        "python": "/home/ada/env/bin/python",
        "program": Program(target="slurmddp.training.trainer.train", config={"name": "gpt", "nodes": 2}),
        "overrides": ("+cluster=here", "nodes=2"),
        "snapshot": False,
    }
    resources = Resources(**{"nodes": 2, "ranks_per_node": 2, **parts[Resources]})
    return Job(
        cluster=site,
        resources=resources,
        policy=PolicySettings(**parts[PolicySettings]),
        **{**values, **parts[Job]},
    )


def batch_settings(**changes: Any) -> BatchSettings:
    """Return the settings that the batch step of `make_job()` reads, with `changes` of its fields."""
    return BatchSettings(**{**settings(make_job()), **changes})


def options_in(script: str) -> list[str]:
    """Return the options in the #SBATCH lines of a script, with their dashes."""
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


class FakePrograms:
    """The folder that the programs in `fake_slurm/` read and write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        self.environ = {"FAKE_SLURM": str(folder), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def calls(self, name: str) -> int:
        path = self.folder / f"{name}.calls"
        return len(path.read_text().splitlines()) if path.exists() else 0
