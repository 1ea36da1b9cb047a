"""`slurmddp explain`: why a run waits, with a site of fake programs."""

from __future__ import annotations

import json

import pytest

from slurmddp.cli.main import main
from slurmddp.slurm import client
from support.runs.cli_runs import end, start
from support.runs.train_runs import only_run
from support.slurm import sites
from support.slurm.slurm_jobs import FakePrograms


@pytest.fixture
def waiting(programs: FakePrograms, project, monkeypatch) -> FakePrograms:
    """Submit a run that waits as job 1."""
    monkeypatch.setattr(client, "on_path", lambda: True)
    assert main(["train", "+cluster=small", "name=first", "nodes=3"]) == 0
    programs.write("partitions", sites.PARTITIONS.replace("MaxNodes=4", "MaxNodes=2"))
    programs.write("nodes-of-partitions", sites.NODES)
    programs.write("config", "ClusterName = alpha\n")
    return programs


def test_a_waiting_run_shows_reason_place_start_and_limits(waiting, capsys):
    waiting.write("jobs/2", "PENDING||Priority|\n")
    waiting.write("start", "2026-11-25T09:00:00")
    waiting.write("place-2", "gpu|9")
    capsys.readouterr()
    assert main(["explain", "first"]) == 0
    out = capsys.readouterr().out
    for line in (
        "state      queued: job 1 waits: other jobs are before it in the queue",
        "next       Nothing to do",
        "reason     Priority",
        "queue      1 job of its partition is ahead of it",
        "start      expected at 2026-11-25 09:00:00",
        "limit      nodes=3: partition 'gpu' gives a job at most 2 (MaxNodes).",
    ):
        assert f"\n  {line}" in out


@pytest.mark.parametrize(("licences", "is_lost"), [("(null)", True), ("", True), ("m:1", False)])
def test_a_job_that_has_lost_its_licences_shows_how_to_restore_them(
    waiting, project, capsys, licences, is_lost
):
    assert main(["train", "+cluster=small", "name=second", "+cluster.sbatch.licenses=m:1"]) == 0
    waiting.write("job", f"JobId=2 JobState=PENDING Licenses={licences} Network=(null)")
    capsys.readouterr()
    assert main(["explain", "second"]) == 0
    restored = "`scontrol update JobId=2 Licenses=m:1` restores it."
    assert (restored in capsys.readouterr().out) == is_lost


def test_programs_read_the_same(waiting, capsys):
    capsys.readouterr()
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["job_id"]) == ("queued", "1")
    assert (found["wait"]["reason"], found["wait"]["start"]) == ("Priority", "")
    assert [one["key"] for one in found["wait"]["limits"]] == ["nodes"]


def test_a_run_that_ended_shows_its_end(waiting, project, capsys):
    folder = only_run(project)
    start(folder, job_id="1")
    end(folder, "failed", code=1, job_id="1")
    capsys.readouterr()
    assert main(["explain", "first"]) == 0
    out = capsys.readouterr().out
    assert "\n  state      failed: " in out and "reason" not in out


def test_a_silent_slurm_is_told_by_the_state(waiting, capsys):
    waiting.write("silence", "Unable to contact slurm controller (connect failure)")
    capsys.readouterr()
    assert main(["explain", "first"]) == 0
    out = capsys.readouterr().out
    assert "state      unknown: " in out and "reason" not in out


def test_a_job_in_the_queue_is_no_reason_for_itself(waiting, capsys):
    for name, text in {
        "config": sites.CONFIG,
        "partitions": sites.PARTITIONS.replace("QoS=N/A", "QoS=tight"),
        "qos": sites.QOS.replace("node=10|3", "node=2|1"),
        "associations": sites.ASSOCIATIONS,
        "account-and-qos": "physics|tight",
    }.items():
        waiting.write(name, text)
    capsys.readouterr()
    assert main(["explain", "--json"]) == 0
    (limit,) = json.loads(capsys.readouterr().out)["wait"]["limits"]
    assert limit["site"] == "QOS 'tight' gives a job at most 2 (MaxTRES node)"
