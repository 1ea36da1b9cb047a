"""An agent that SLURM could not start ends the attempt, and the job runs again on the same nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.batch.attempt import Attempt
from slurmddp.batch.launch_failure import LaunchFailure, record
from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.schema import PolicySettings
from support.runs.taken_names import refusing_open
from support.slurm.batch_run import RUNNING, Run, Step, do, exits, leave, leaves, node
from support.slurm.slurm_jobs import batch_settings

REPORT = "srun: error: task 1 launch failed: Slurmd could not connect IO\n"
REPORTED = do(lambda run: (run.log_dir / "batch.log").write_text(REPORT)) + leaves("node-0.log")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.slurm.nodes = node("n1") + node("n2")
    return made


@pytest.mark.parametrize(
    "step", [leave({0: 75}, 143), leave({0: 1}, 1), exits(0)], ids=["ended by the watch", "failed", "alone"]
)
def test_a_failed_launch_is_the_cause_and_says_nothing_against_the_node(run: Run, step: Step) -> None:
    run.start(REPORTED + step)
    assert run.end == ("failed", "requeue")
    failure = read_failure(run.folder, 0)
    assert failure is not None
    assert (
        failure.sentence == "the agent of node 1 on n2 was not started by SLURM: Slurmd could not connect IO"
    )
    assert run.excluded() == []
    assert "lost" not in run.events("ended")[0]


def test_launches_that_fail_again_and_again_end_the_run(run: Run) -> None:
    restarts = PolicySettings().max_restarts
    for count in range(restarts + 1):
        run.slurm.job = RUNNING.replace("Restarts=0", f"Restarts={count}")
        run.start(REPORTED + exits(1), SLURM_RESTART_COUNT=str(count))
    assert [following for _, following in run.ends] == ["requeue"] * restarts + ["none"]


def test_an_attempt_that_may_lose_nodes_begins_without_the_missing_one(tmp_path: Path) -> None:
    run = Run(tmp_path, spare_nodes=1)
    run.start(REPORTED + leave({0: 0}, 0))
    assert run.end == ("finished", "none")


def test_a_superseded_attempt_records_no_failed_launch(run: Run) -> None:
    later = do(lambda run: run.folder.claim_attempt())
    assert run.start(REPORTED + later + exits(1)) == 79
    assert run.events("rank_failed") == []


@pytest.mark.parametrize("opened", [os.open, refusing_open])
def test_a_failure_that_is_recorded_already_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: object
) -> None:
    folder = RunFolder(tmp_path)
    lines: list[str] = []
    attempt = Attempt(folder, folder.claim_attempt(), batch_settings(nodes=2), "41", lines.append)
    monkeypatch.setattr(os, "open", opened)
    for host in ("n1", "n2"):
        record(attempt, LaunchFailure(1, host, "Slurmd could not connect IO"))
    assert lines == []
    assert [event["host"] for event in folder.events()] == ["n1"]
