"""Stops on a real SLURM that no signal leads to: a person's `slurmddp stop`, and the end of the time."""

from __future__ import annotations

import json

import pytest

from support.slurm.train_project import UNHURRIED, Command, Run, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def command(sandbox, tmp_path_factory) -> Command:
    return Command(make_project(tmp_path_factory.mktemp("project")), sandbox.environment())


def ends(run: Run) -> list[tuple[str, str]]:
    return [(event["outcome"], event["next"]) for event in run.events("ended")]


def test_a_person_stops_a_run_and_goes_on_with_it(command: Command, tmp_path) -> None:
    # With caches of a minute, the ranks see the stop after 150 steps.
    run = command.submit("stopped", "nodes=2", "train.steps=240", UNHURRIED)
    run.wait_step(5)
    assert "saves a checkpoint" in command("stop", "stopped", cwd=tmp_path)
    run.wait("end", lambda: run.events("ended"))
    assert ends(run) == [("stopped", "none")]
    assert run.events("ended")[0]["exit_code"] == 75
    saved = run.events("saved")[-1]["step"]
    assert 5 <= saved < 240
    run.wait("empty queue", lambda: command.slurm("squeue", "-h", "-j", run.job_id, "-t", "R,CG,PD") == "")
    assert "stopped: it was stopped on request" in command("status", "stopped", cwd=tmp_path)
    assert "nothing to stop" in command("stop", "stopped", cwd=tmp_path)
    command("resume", "stopped", cwd=tmp_path)
    run.wait_finished()
    assert run.events("resumed")[0]["step"] == saved
    assert sorted(run.losses()) == list(range(1, 241))
    assert not (run.folder / "stop").exists()


def test_a_job_stops_early_enough_for_a_save_that_takes_longer_than_the_lead(command: Command) -> None:
    """SLURM sends USR2 up to half a minute early; a save as long as the one recorded here needs two more."""
    limits = ["time_limit=3", "policy.signal_lead_s=1", "+cluster.sbatch.hold=true"]
    run = command.submit("deadline", "nodes=2", "train.steps=100000", *limits)
    earlier = {"event": "saved", "time": 0, "attempt": 0, "step": 0, "seconds": 128.0}
    with (run.folder / "attempts.jsonl").open("a") as stream:
        stream.write(json.dumps(earlier) + "\n")
    command.slurm("scontrol", "release", run.job_id)
    run.wait("end", lambda: run.events("ended"))
    assert ends(run) == [("stopped", "requeue")]
    assert run.events("signalled")[0]["signal"] == "time_limit"
    assert run.events("saved")[-1]["step"] > 0
    assert [event["about"] for event in run.events("warned")] == ["lead", "grace"]
