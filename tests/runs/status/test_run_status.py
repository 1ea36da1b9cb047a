"""The values of a status: step, loss, saves, failure, the attempt before; of one run or of many at once."""

from __future__ import annotations

import json

import pytest

from slurmddp.control.json_encoding import json_value
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import status, statuses
from slurmddp.slurm.states import JobState
from support.runs.job_events import (
    FIRST_STEP,
    REQUEUED,
    RESUBMITTED,
    SAVED,
    SUBMITTED,
    CountingSlurm,
    ended,
    signalled,
    started,
)
from support.runs.run_events import event, saved, submitted, write
from support.slurm.slurm_in_memory import FakeSlurm


def log(folder, step, attempt=0, time=120.0, **values):
    append_line(folder.metrics_file, {"step": step, "attempt": attempt, "time": time, **values})


def fail(folder, **left):
    folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    folder.failure_file(0).write_text(json.dumps({"rank": 3, "host": "node4", **left}))


def test_a_resubmitted_run_is_asked_for_by_its_new_job(folder):
    write(folder, SUBMITTED, started(), ended("stopped", "resubmit", code=75), RESUBMITTED)
    slurm = CountingSlurm()
    slurm.set_state("8", "PENDING", reason="Dependency")
    current = status(folder, slurm)
    assert current.state == "stopped"
    assert current.job_id == "8"
    assert slurm.queries == [["8"]]


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", None], ids=["completed", "failed", "forgotten"])
def test_a_job_that_began_no_attempt_is_shown_with_its_last_line(folder, state):
    write(folder, SUBMITTED, started(), ended("stopped"), submitted(400.0, "8"))
    slurm = CountingSlurm()
    if state:
        slurm.set_state("8", state)
    assert "Cannot write" not in status(folder, slurm).detail
    folder.log_dir(0).mkdir(parents=True)
    folder.job_log("8").write_text("module: not found\n\nCannot write to /runs/gpt/logs on c07.\n")
    current = status(folder, slurm)
    assert current.detail == "job 8 began no attempt: Cannot write to /runs/gpt/logs on c07"
    assert current.state == ("failed" if state == "FAILED" else "lost")
    slurm.set_state("8", "PENDING")
    assert status(folder, slurm).state == "queued"


def test_all_runs_are_asked_for_at_once(tmp_path):
    folders = []
    for number in range(5):
        run = RunFolder(tmp_path / f"run-{number}")
        run.path.mkdir()
        run.config_file.write_text("train: {steps: 4}\n")
        write(run, SUBMITTED | {"job_id": str(number)}, started(job_id=str(number)))
        folders.append(run)
    write(folders[0], ended("finished"))
    slurm = CountingSlurm()
    statuses(folders, slurm)
    assert slurm.queries == [["1", "2", "3", "4"]]


def test_a_job_of_which_the_accounting_tells_nothing_is_unknown(folder):
    write(folder, SUBMITTED, started())
    slurm = FakeSlurm()
    slurm.states["7"] = JobState(job_id="7", state="UNKNOWN", error="sacct failed: no\ndatabase.")
    current = status(folder, slurm)
    assert (current.state, current.active) == ("unknown", True)
    assert (
        current.detail == "SLURM does not answer (sacct failed: no database); by the run folder it is running"
    )


def test_a_job_that_ends_while_slurm_is_asked_is_not_lost(folder):
    write(folder, SUBMITTED, started())

    class Slow(FakeSlurm):
        def jobs(self, job_ids):
            write(folder, ended("finished"))
            return {}

    assert status(folder, Slow()).state == "finished"


def test_the_values_shown_are_the_newest(folder):
    write(
        folder,
        SUBMITTED,
        started(),
        saved(150.0, 100),
        ended("failed", "requeue", code=137),
        started(1),
        event("resumed", 250.0, 1, step=100),
    )
    for step in range(10, 140, 10):
        log(folder, step, loss=3.0, tokens_per_s=9.0)
    log(folder, 100, eval_loss=2.5)
    slurm = FakeSlurm()
    slurm.set_state("7", "RUNNING")
    current = status(folder, slurm)
    assert (current.step, current.total_steps, current.attempts) == (100, 400, 2)
    assert (current.saved_step, current.saved, current.held_out) == (100, 150.0, 2.5)
    log(folder, 110, 1, 260.0, loss=2.0, tokens_per_s=11.0)
    current = status(folder, slurm)
    assert (current.step, current.loss, current.rate, current.rate_unit) == (
        110,
        2.0,
        11.0,
        "tokens/s",
    )
    assert (current.seen, current.nodes) == (260.0, "node[1-2]")


def test_the_number_of_steps_of_a_script_is_unknown(folder):
    with folder.config_file.open("a") as stream:
        stream.write("program:\n  script: mine.py\n")
    write(folder, SUBMITTED, started())
    assert status(folder, None).total_steps is None


def test_a_persons_training_function_has_a_number_of_steps_once_it_reports_steps(folder):
    with folder.config_file.open("a") as stream:
        stream.write("program:\n  _target_: mine.train\n")
    write(folder, SUBMITTED, started())
    assert status(folder, None).total_steps is None
    write(folder, event("first_step", 120.0, 0, step=1))
    assert status(folder, None).total_steps == 400
    write(folder, ended("finished", next_="none", code=0))
    assert status(folder, None).state == "finished"


def test_a_failure_without_a_rank_names_the_setup_line_that_failed(folder):
    failure = "setup line `module load cuda` failed with code 1"
    warning = event("warned", 115.0, 0, about="setup", failure=failure, text=f"The {failure}.")
    write(folder, SUBMITTED, started(), warning, {**warning, "failure": failure.replace("cuda", "gcc")})
    assert "setup line" not in status(folder, None).detail
    write(folder, ended("failed", code=127))
    current = status(folder, None)
    assert current.detail.endswith("; before that, the setup line `module load cuda` failed with code 1")
    fail(folder, exit_code=1)
    assert "setup line" not in status(folder, None).detail


def test_a_failure_names_rank_and_host_unless_its_file_is_incomplete(folder):
    write(folder, SUBMITTED, started(), ended("failed", code=1))
    fail(folder, exit_code=1, last_lines=["boom"])
    folder.rank_log(0, 3).write_text("boom\n")
    current = status(folder, None)
    assert "rank 3 on node4 ended with exit code 1" in current.detail
    assert current.failure is not None
    assert current.failure.last_lines == ("boom",)
    assert current.log == folder.rank_log(0, 3)
    assert f"slurmddp resume {folder.name}" in current.advice
    folder.failure_file(0).write_text('{"rank": 3, "ho')
    assert status(folder, None).failure is None


def test_a_damaged_folder_is_reported_and_stops_no_list(folder, tmp_path):
    folder.attempts_file.write_text("no json\n")
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    other.config_file.write_text("- a list\n")
    currentes = statuses([folder, other], FakeSlurm())
    assert [run.state for run in currentes] == ["unknown", "unknown"]
    assert "not JSON" in currentes[0].detail


KILLED = ended("failed", "requeue", code=137)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([signalled("SIGTERM"), REQUEUED], "requeued, no save recorded"),
        ([signalled("SIGUSR2"), SAVED, REQUEUED], "time limit, last save at step 200"),
        ([signalled("the time limit"), REQUEUED], "time limit, no save recorded"),
        ([signalled("/runs/stop"), SAVED, ended("stopped", code=75)], "on request, last save at step 200"),
        ([SAVED], "SLURM removed it from its nodes, last save at step 200"),
        ([KILLED], "failed, exit code 137: rank 3 on node2 was killed by SIGSEGV"),
        (
            [FIRST_STEP, KILLED],
            "failed, exit code 137, no save recorded: rank 3 on node2 was killed by SIGSEGV",
        ),
        ([FIRST_STEP | {"loads": False}, REQUEUED], "stopped"),  # The program may save elsewhere.
        ([REQUEUED], "stopped"),  # A script that records no save may have saved.
        (
            [REQUEUED | {"without_progress": 1}],
            "stopped, 1 time limit in a row without a newer checkpoint",
        ),
        (
            [REQUEUED | {"without_progress": 2}],
            "stopped, 2 time limits in a row without a newer checkpoint",
        ),
    ],
)
def test_the_end_of_the_attempt_before_is_shown(folder, events, text):
    write(folder, SUBMITTED, started(), *events, started(1))
    if KILLED in events:
        fail(folder, host="node2", signal="SIGSEGV")
    current = status(folder, None)
    assert current.before == f"attempt 0 ended: {text}"
    assert current.state == "starting"


def test_an_attempt_that_starts_shows_the_step_of_its_checkpoint_and_no_earlier_values(folder):
    write(folder, SUBMITTED, started(), FIRST_STEP, SAVED)
    log(folder, 217, time=190.0, loss=3.0, tokens_per_s=9.0)
    write(folder, ended("failed", "requeue", code=137))
    assert (status(folder, None).step, status(folder, None).loss) == (217, 3.0)
    write(folder, started(1))
    current = status(folder, None)
    assert (current.state, current.step, current.loss, current.rate) == (
        "starting",
        200,
        None,
        None,
    )


def test_json_holds_only_what_json_can_say(folder):
    write(folder, SUBMITTED, started(), ended("failed", code=1))
    log(folder, 10, loss=float("nan"))
    text = json.dumps(json_value(status(folder, None)), allow_nan=False)
    assert json.loads(text)["loss"] is None
    assert json.loads(text)["path"] == str(folder.path)


def test_ranks_that_restarted_in_place_stand_at_the_step_from_which_they_resumed(folder):
    write(folder, started(), FIRST_STEP, saved(120.0, 100))
    log(folder, 140, time=125.0, loss=3.0)
    write(folder, event("restarted", 126.0, 0, restart_count=1, step=140))
    assert status(folder, None).step == 140  # Where they go on is not known yet.
    write(folder, event("resumed", 127.0, 0, step=80, **{"from": "disk"}))
    assert status(folder, None).step == 80
    log(folder, 90, time=128.0, loss=3.0)
    assert status(folder, None).step == 90
    write(folder, saved(129.0, 100))
    assert status(folder, None).step == 100


def test_ranks_that_restarted_before_their_first_step_stand_at_the_step_of_their_checkpoint(folder):
    write(folder, started())
    log(folder, 140, time=125.0, loss=3.0)
    write(folder, ended("stopped", "requeue"), started(1))
    write(folder, event("resumed", 201.0, 1, step=100, **{"from": "disk"}))
    assert status(folder, None).step == 100
    write(folder, event("restarted", 202.0, 1, restart_count=1, step=-1))
    write(folder, event("resumed", 203.0, 1, step=100, **{"from": "disk"}))
    assert status(folder, None).step == 100
