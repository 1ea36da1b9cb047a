"""The state of a run: the run folder decides first, SLURM or the process second; unknown is never success."""

from __future__ import annotations

import os
import socket
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
    REQUEUED,
    RESUBMITTED,
    SUBMITTED,
    CountingSlurm,
    ended,
    started,
)
from support.runs.run_events import write
from support.slurm.slurm_in_memory import FakeSlurm


@pytest.mark.parametrize(
    ("count", "checkpoints", "advice"),
    [
        (None, None, "See `slurmddp logs"),
        (4, None, "program.checkpoints=PATH"),
        (4, "out/*.pt", "time_limit=..."),
    ],
)
def test_a_run_that_ended_at_its_time_limits_says_what_to_do(make_run, slurm, count, checkpoints, advice):
    run = make_run()
    if checkpoints is not None:
        with run.config_file.open("a") as stream:
            stream.write(f"program: {{script: mine.py, checkpoints: '{checkpoints}'}}\n")
    end = {**ended("no_progress", code=79), "without_progress": count}
    write(run, SUBMITTED, started(), end)
    current = status(run, slurm)
    assert current.state == "failed"
    assert ("4 time limits in a row" in current.detail) == (count == 4)
    assert advice in current.advice
    assert ("program.checkpoints=PATH" in current.advice) == (count == 4 and checkpoints is None)


@pytest.mark.parametrize(
    ("restarts", "further", "detail"),
    [
        (2, {}, True),
        (2, {"progressed": True}, False),
        (0, {}, False),
    ],
    ids=["from the beginning each time", "with a newer checkpoint", "without a restart"],
)
def test_a_program_that_used_its_restarts_without_a_newer_checkpoint_is_told_so(
    make_run, slurm, restarts, further, detail
):
    run = make_run()
    again = [
        {"event": "restarted", "attempt": 0, "restart_count": number + 1, "step": -1}
        for number in range(restarts)
    ]
    write(run, SUBMITTED, started(), *again, {**ended("failed", code=1), **further})
    current = status(run, slurm)
    assert current.state == "failed"
    assert ("after 2 restarts in place, and slurmddp saw no newer checkpoint" in current.detail) == detail
    assert (f"slurmddp resume {run.name} program.checkpoints=PATH" in current.advice) == detail


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
        ([SUBMITTED, started(), REQUEUED, started(1), ended("finished", attempt=1)], "finished"),
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
        ([SUBMITTED, started(), REQUEUED], "PENDING", "stopped", True),
        ([SUBMITTED, started(), REQUEUED], "COMPLETING", "stopped", True),
        ([SUBMITTED, started(), REQUEUED], None, "cancelled", False),
        ([SUBMITTED, started(), ended("failed", "requeue", code=1)], "PENDING", "stopped", True),
        ([SUBMITTED, started(), ended("failed", code=1), RESUBMITTED], "PENDING", "queued", True),
        # A controller that lost its state gives out job ids from 1 again, and so does a new sandbox.
        ([SUBMITTED, started(), ended("failed", code=1), SUBMITTED], "PENDING", "queued", True),
        ([started(), SUBMITTED, ended("failed", code=1), SUBMITTED], "PENDING", "queued", True),
        ([SUBMITTED, started(), CANCELLED], "COMPLETING", "cancelled", True),
        ([SUBMITTED, started(), CANCELLED], None, "cancelled", False),
    ],
)
def test_slurm_settles_the_rest(folder, events, job, state, active):
    write(folder, *events)
    slurm = FakeSlurm()
    if job:
        slurm.set_state(read_history(folder).job_id, job, reason="Priority")
    current = status(folder, slurm)
    assert (current.state, current.active) == (state, active)


@pytest.mark.parametrize("state", sorted(ALL | {"UNKNOWN"}))
@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_that_slurm_says_makes_a_success(state, cancelled):
    for events in ([SUBMITTED], [SUBMITTED, started()], [SUBMITTED, started(), ended("stopped", "requeue")]):
        job = JobState(job_id="7", state=state)
        verdict = decide(fold(events), run="gpt", cancelled=cancelled, asked=True, job=job)
        assert verdict.state in STATE_STYLES
        assert verdict.state != "finished"
        assert verdict.active or state in TERMINAL | {"UNKNOWN"} or cancelled


@pytest.mark.parametrize(
    ("cancelled", "state", "detail"),
    [(False, "unknown", "does not answer"), (True, "cancelled", "it is unknown whether job 7 has ended")],
)
def test_a_job_of_which_a_silent_slurm_says_nothing_may_still_be_there(folder, cancelled, state, detail):
    write(folder, SUBMITTED, started())
    if cancelled:
        folder.cancelled_file.touch()
    current = status(folder, FakeSlurm(silence="Unable to contact slurm controller"))
    assert (current.state, current.active) == (state, True)
    assert detail in current.detail and "Unable to contact slurm controller" in current.detail


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
    events = (SUBMITTED, started(), FIRST_STEP, REQUEUED)
    for number, state in zip(events, ("queued", "starting", "running", "stopped"), strict=True):
        write(folder, number)
        assert status(folder, None).state == state


def test_a_script_that_records_no_first_step_runs_as_soon_as_it_has_started(folder):
    with folder.config_file.open("a") as stream:
        stream.write("program:\n  script: train.py\n")
    write(folder, SUBMITTED, started())
    assert status(folder, None).state == "running"


def test_a_suspended_run_says_what_resumes_it(folder):
    write(folder, SUBMITTED, started(), FIRST_STEP)
    slurm = FakeSlurm()
    slurm.set_state("7", "SUSPENDED")
    current = status(folder, slurm)
    assert current.state == "running" and "suspended by SLURM" in current.detail
    assert "`scontrol resume 7`" in current.advice


def test_a_cancel_that_left_the_job_to_run_says_so(folder):
    """Ctrl-C ended `slurmddp cancel` after it wrote the file `cancelled`, and before scancel."""
    write(folder, SUBMITTED, started())
    folder.cancelled_file.touch()
    slurm = FakeSlurm()
    slurm.set_state("7", "RUNNING")
    current = status(folder, slurm)
    assert (current.state, current.active) == ("cancelled", True)
    assert "did not reach job 7" in current.detail
    assert current.advice == f"`slurmddp cancel {folder.name}` once more ends it."
    write(folder, CANCELLED)
    assert "SLURM is still ending job 7" in status(folder, slurm).detail


def test_a_pending_run_says_why_and_what_to_do(folder):
    write(folder, SUBMITTED)
    slurm = FakeSlurm()
    slurm.set_state("7", "PENDING", reason="PartitionTimeLimit")
    current = status(folder, slurm)
    assert "more time than the partition allows" in current.detail
    assert f"slurmddp resume {folder.name} time_limit=" in current.advice


@pytest.mark.parametrize(
    ("events", "requeued"),
    [
        ([SUBMITTED], False),
        ([SUBMITTED, started(), REQUEUED], True),
        ([SUBMITTED, started()], True),
        ([SUBMITTED, started(), ended("failed", code=1), RESUBMITTED], False),
        ([SUBMITTED, started(), ended("stopped", "resubmit", code=75), RESUBMITTED], False),
    ],
)
def test_only_a_job_that_slurm_requeued_is_told_so_while_its_begin_time_has_not_come(
    folder, events, requeued
):
    """A new job of an earlier run waits for `begin=` of its cluster file."""
    write(folder, *events)
    slurm = FakeSlurm()
    for job_id in ("7", "8"):
        slurm.set_state(job_id, "PENDING", reason="BeginTime")
    detail = status(folder, slurm).detail
    assert ("SLURM requeued it" in detail, "its begin time has not come" in detail) == (
        requeued,
        not requeued,
    )


@pytest.mark.parametrize(
    ("facts", "state", "active", "detail"),
    [
        ({}, "starting", True, str(os.getpid())),
        (
            {"pid": 2**22},
            "lost",
            False,
            "has ended, but recorded no end",
        ),  # Linux gives no such number to a process.
        (
            {"time": 1_000_000_000.0},
            "lost",
            False,
            "has ended, but recorded no end",
        ),  # A stranger has the number of its process.
        ({"host": "some-other-host"}, "starting", True, "can't be seen"),
    ],
)
def test_a_local_run_is_judged_by_its_process(folder, facts, state, active, detail):
    known = {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "nodes": "here"}
    write(folder, started(job_id="local-1", launcher="local", **(known | facts)))
    slurm = CountingSlurm()
    current = status(folder, slurm)
    assert (current.state, current.active) == (state, active)
    assert detail in current.detail
    assert slurm.queries == []
