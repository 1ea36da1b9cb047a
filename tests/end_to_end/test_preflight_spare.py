"""A spare takes the place of an unhealthy node in the same attempt, on pretended nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PROGRAM = '''
"""A training whose ranks find on some nodes that their folder for temporary files can't be written to."""

import os
from pathlib import Path

from slurmddp.training.trainer.loop import train

started = Path(f"/proc/{os.getppid()}/environ").read_text().split("\\0")
(agent,) = (line.partition("=")[2] for line in started if line.startswith("SLURM_NODEID="))
if agent in os.environ["UNFIT"].split():
    os.environ["TMPDIR"] = "/proc"
'''
SMALL = [
    "model=gpt_tiny",
    "train.steps=4",
    "train.eval_batches=1",
    "train.sample_chars=5",
    "ranks_per_node=1",
]


class Project:
    """A folder in which the `slurmddp` command is typed, and the run that it leaves there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "unfit_program.py").write_text(PROGRAM)

    def type(self, *words: str, unfit: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slurmddp", *words],
            cwd=self.path,
            env={**scrub(os.environ), "OMP_NUM_THREADS": "1", "UNFIT": unfit},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def train(self, *overrides: str, unfit: str) -> subprocess.CompletedProcess[str]:
        own = ["program._target_=unfit_program.train", "preflight=on", "name=tried"]
        return self.type("train", *SMALL, *own, *overrides, unfit=unfit)

    @property
    def run(self) -> RunFolder:
        (folder,) = (self.path / "runs").glob("tried-*")
        return RunFolder(folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run.events() if event["event"] == kind]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_spare_takes_the_place_of_a_node_that_is_not_fit(project: Project) -> None:
    done = project.train("nodes=2", "spare_nodes=1", unfit="1")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = project.events("preflight")
    assert (first["generation"], list(first["unfit"])) == (0, ["1"])
    assert (second["generation"], second["nodes"], second["failed"]) == (1, 2, [])
    (restarted,) = project.events("restarted")
    assert (restarted["node"], restarted["rank"], restarted["spare"]) == (1, None, [2])
    assert [(end["attempt"], end["outcome"]) for end in project.events("ended")] == [(0, "finished")]
    shown = done.stdout + done.stderr
    assert "node 1 (localhost) was lost to the preflight: /proc (TMPDIR) can't be written to" in shown
    assert "the ranks restart in place (generation 1, with spare node 2)" in shown
    told = project.type("status", "-v", project.run.name).stdout
    assert "generation 1 of ranks runs with spare node 2" in told
    assert "node 1 (localhost) was lost to the preflight" in told


def test_a_second_one_takes_the_next_spare_and_then_the_attempt_ends(project: Project) -> None:
    done = project.train("nodes=2", "spare_nodes=2", unfit="1 2 3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [event.get("unfit", {}).keys() for event in project.events("preflight")] == [{"1"}] * 3
    assert [event["spare"] for event in project.events("restarted")] == [[2], [3]]
    assert [(end["attempt"], end["next"]) for end in project.events("ended")] == [(0, "none")]
    assert "node 1: /proc (TMPDIR) can't be written to" in project.run.failure_file(0).read_text()


def test_with_elastic_the_others_begin_without_it(project: Project) -> None:
    done = project.train("nodes=2", "elastic=true", unfit="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["nodes"] for event in project.events("preflight")] == [2, 1]
    (restarted,) = project.events("restarted")
    assert (restarted["node"], restarted["nodes"]) == (1, 1)
    steps = [json.loads(line)["step"] for line in project.run.metrics_file.read_text().splitlines()]
    assert steps[-1] == 4
