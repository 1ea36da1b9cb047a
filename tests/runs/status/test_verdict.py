"""The state of a run: the run folder decides first, SLURM or the process second; unknown is never success."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from slurmddp.runs.folder.history import fold, read_history
from slurmddp.runs.status.run_status import status
from slurmddp.runs.status.verdict import decide
from slurmddp.runs.text_format import STATE_STYLES
from slurmddp.slurm.states import ALL, TERMINAL, JobState
from support.runs.job_events import (
    CANCELLED,
    FIRST_STEP,
    SUBMITTED,
    CountingSlurm,
    ended,
    started,
)
from support.runs.run_events import write
from support.slurm.slurm_in_memory import FakeSlurm


@pytest.mark.parametrize("count", [None, 4])
def test_a_run_that_ended_at_its_time_limits_says_what_to_do(make_run, slurm, count):
    run = make_run()
    end = {**ended("no_progress", code=79), "without_progress": count}
    write(run, SUBMITTED, started(), end)
    found = status(run, slurm)
    assert found.state == "failed"
    assert ("4 in a row" in found.detail) == (count == 4)
    assert ("program.checkpoints=PATH" in found.advice) == (count == 4)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "preparing"),
        ([SUBMITTED, started(), ended("finished")], "finished"),
        ([SUBMITTED, started(), ended("failed", code=1)], "failed"),
        ([SUBMITTED, started(), ended("config", code=78)], "failed"),
        ([SUBMITTED, started(), ended("no_progress", code=79)], "failed"),
        ([SUBMITTED, started(), ended("cancelled", code=75)], "cancelled"),
        ([SUBMITTED, started(), ended("stopped", code=75)], "stopped"),
        ([SUBMITTED, started(), ended("a word of a later version", code=0)], "failed"),
        ([SUBMITTED, started(), ended(None, code=0)], "failed"),
        (
            [
                SUBMITTED,
                started(),
                ended("stopped", "requeue", code=75),
                started(1),
                ended("finished", attempt=1),
            ],
            "finished",
        ),
        ([SUBMITTED, started(), ended("stopped", "requeue"), ended("stopped", "none")], "stopped"),
        ([started(), ended("finished"), SUBMITTED], "finished"),
        ([SUBMITTED, CANCELLED], "cancelled"),
        ([SUBMITTED, started(), CANCELLED, ended("cancelled", code=75)], "cancelled"),
        ([SUBMITTED, started(), ended("finished"), CANCELLED], "finished"),
    ],
)
def test_the_folder_alone_settles_an_ended_run(folder, events, state):
    write(folder, *events)
    slurm = CountingSlurm()
    assert status(folder, slurm).state == state
    assert slurm.queries == []


@pytest.mark.parametrize(
    ("events", "job", "state", "active"),
    [
        ([SUBMITTED], "PENDING", "queued", True),
        ([SUBMITTED], "RUNNING", "starting", True),
        ([SUBMITTED], "CONFIGURING", "starting", True),
        ([SUBMITTED], None, "cancelled", False),
        ([SUBMITTED], "FAILED", "failed", False),
        ([SUBMITTED, started()], "RUNNING", "starting", True),
        ([SUBMITTED, started(), FIRST_STEP], "RUNNING", "running", True),
        ([SUBMITTED, started(), FIRST_STEP], "COMPLETING", "running", True),
        ([SUBMITTED, started()], "PENDING", "stopped", True),
        ([SUBMITTED, started()], None, "lost", False),
        ([SUBMITTED, started()], "COMPLETED", "lost", False),
        ([SUBMITTED, started()], "NODE_FAIL", "failed", False),
        ([SUBMITTED, started()], "OUT_OF_MEMORY", "failed", False),
        ([SUBMITTED, started()], "TIMEOUT", "failed", False),
        ([SUBMITTED, started()], "CANCELLED", "cancelled", False),
        ([SUBMITTED, started()], "NEW_IN_2030", "unknown", True),
        ([SUBMITTED, started(), ended("stopped", "requeue", code=75)], "PENDING", "stopped", True),
        ([SUBMITTED, started(), ended("stopped", "requeue", code=75)], "COMPLETING", "stopped", True),
        ([SUBMITTED, started(), ended("stopped", "requeue", code=75)], None, "cancelled", False),
        ([SUBMITTED, started(), ended("failed", "requeue", code=1)], "PENDING", "stopped", True),
        (
            [SUBMITTED, started(), ended("failed", code=1), SUBMITTED | {"job_id": "9"}],
            "PENDING",
            "queued",
            True,
        ),
        ([SUBMITTED, started(), CANCELLED], "COMPLETING", "cancelled", True),
        ([SUBMITTED, started(), CANCELLED], None, "cancelled", False),
    ],
)
def test_slurm_settles_the_rest(folder, events, job, state, active):
    write(folder, *events)
    slurm = FakeSlurm()
    if job:
        slurm.set_state(read_history(folder).job_id, job, reason="Priority")
    found = status(folder, slurm)
    assert (found.state, found.active) == (state, active)


@pytest.mark.parametrize("state", sorted(ALL | {"UNKNOWN"}))
@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_that_slurm_says_makes_a_success(state, cancelled):
    for events in ([SUBMITTED], [SUBMITTED, started()], [SUBMITTED, started(), ended("stopped", "requeue")]):
        job = JobState(job_id="7", state=state)
        found = decide(fold(events), run="gpt", cancelled=cancelled, asked=True, job=job)
        assert found.state in STATE_STYLES
        assert found.state != "finished"
        assert found.active or state in TERMINAL | {"UNKNOWN"} or cancelled


def test_a_silent_slurm_is_unknown_and_says_why(folder):
    write(folder, SUBMITTED, started())
    found = status(folder, FakeSlurm(silence="Unable to contact slurm controller"))
    assert found.state == "unknown"
    assert "Unable to contact slurm controller" in found.detail


def test_a_cancelled_job_that_slurm_says_nothing_about_may_still_be_there(folder):
    write(folder, SUBMITTED, started())
    folder.cancelled_file.touch()
    found = status(folder, FakeSlurm(silence="Unable to contact slurm controller"))
    assert (found.state, found.active) == ("cancelled", True)
    assert "can't be seen" in found.detail


def test_the_mark_of_a_cancel_counts_before_the_job_has_ended(folder):
    write(folder, SUBMITTED, started())
    folder.cancelled_file.touch()
    slurm = FakeSlurm()
    slurm.set_state("7", "RUNNING")
    assert status(folder, slurm).state == "cancelled"
    assert status(folder, slurm).active
    write(folder, ended("stopped", code=75))
    assert not status(folder, slurm).active


def test_without_slurm_the_folder_is_believed(folder):
    write(folder, SUBMITTED)
    assert status(folder, None).state == "queued"
    write(folder, started())
    assert status(folder, None).state == "starting"
    write(folder, FIRST_STEP)
    assert status(folder, None).state == "running"
    write(folder, ended("stopped", "requeue", code=75))
    assert status(folder, None).state == "stopped"


def test_a_script_that_records_no_first_step_runs_as_soon_as_it_has_started(folder):
    with folder.config_file.open("a") as stream:
        stream.write("program:\n  script: train.py\n")
    write(folder, SUBMITTED, started())
    assert status(folder, None).state == "running"


def test_a_pending_run_says_why_and_what_to_do(folder):
    write(folder, SUBMITTED)
    slurm = FakeSlurm()
    slurm.set_state("7", "PENDING", reason="PartitionTimeLimit")
    found = status(folder, slurm)
    assert "more time than the partition allows" in found.detail
    assert f"slurmddp resume {folder.name} time_limit=" in found.advice


def local(pid, host=None, when=None):
    return {
        "event": "started",
        "time": time.time() if when is None else when,
        "attempt": 0,
        "job_id": "local-1",
        "launcher": "local",
        "pid": pid,
        "host": host or socket.gethostname(),
        "nodes": "here",
    }


def test_a_local_run_is_judged_by_its_process(folder):
    write(folder, local(os.getpid()))
    slurm = CountingSlurm()
    found = status(folder, slurm)
    assert (found.state, found.active) == ("starting", True)
    assert str(os.getpid()) in found.detail
    assert slurm.queries == []


def test_a_local_run_whose_process_is_gone_is_lost(folder):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    write(folder, local(done.pid))
    found = status(folder, None)
    assert (found.state, found.active) == ("lost", False)


def test_a_stranger_with_the_same_number_is_not_the_run(folder):
    write(folder, local(os.getpid(), when=1_000_000_000.0))
    assert status(folder, None).state == "lost"


def test_a_local_run_on_another_host_can_not_be_seen(folder):
    write(folder, local(1, host="some-other-host"))
    found = status(folder, None)
    assert found.state == "starting"
    assert "can't be seen" in found.detail
