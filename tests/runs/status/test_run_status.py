"""What `status` says: the run folder first, SLURM second, unknown never success."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from slurmddp.runs.folder.history import fold, read_history
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import status, statuses
from slurmddp.runs.status.verdict import STATES, decide
from slurmddp.slurm.reasons import explain
from slurmddp.slurm.states import ALL, TERMINAL, JobState
from support.slurm.slurm_in_memory import FakeSlurm

SUBMITTED = {"event": "submitted", "time": 100.0, "job_id": "7", "submitter": "sbatch"}
RESUBMITTED = {"event": "submitted", "time": 400.0, "job_id": "8", "submitter": "sbatch"}
FIRST_STEP = {"event": "first_step", "time": 120.0, "attempt": 0, "step": 1}
SAVED = {"event": "saved", "time": 160.0, "attempt": 0, "step": 200, "seconds": 0.1}
CANCELLED = {"event": "cancelled", "time": 300.0, "job_id": "7"}


def started(attempt=0, job_id="7", **more):
    return {
        "event": "started",
        "time": 110.0 + attempt,
        "attempt": attempt,
        "job_id": job_id,
        "launcher": "slurm",
        "nodes": "node[1-2]",
        **more,
    }


def ended(outcome, next_="none", attempt=0, code=0, job_id="7"):
    return {
        "event": "ended",
        "time": 200.0 + attempt,
        "attempt": attempt,
        "job_id": job_id,
        "exit_code": code,
        "outcome": outcome,
        "next": next_,
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "gpt-0a1b2c3d"
    path.mkdir()
    (path / "config.yaml").write_text("name: gpt\nnodes: 2\nranks_per_node: 2\ntrain:\n  steps: 400\n")
    return RunFolder(path)


def write(folder, *events):
    for event in events:
        append_line(folder.attempts_file, event)


@pytest.mark.parametrize("count", [None, 4])
def test_a_run_that_ended_at_its_time_limits_says_what_to_do(make_run, slurm, count):
    run = make_run()
    end = {**ended("no_progress", code=79), "without_progress": count}
    write(run, SUBMITTED, started(), end)
    found = status(run, slurm)
    assert found.state == "failed"
    assert ("4 in a row" in found.detail) == (count == 4)
    assert ("program.checkpoints=PATH" in found.advice) == (count == 4)


class CountingSlurm(FakeSlurm):
    """Remembers which jobs it was asked for."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def jobs(self, job_ids):
        self.queries.append(list(job_ids))
        return super().jobs(job_ids)


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


def test_a_resubmitted_run_is_asked_for_by_its_new_job(folder):
    write(folder, SUBMITTED, started(), ended("stopped", "resubmit", code=75), RESUBMITTED)
    slurm = CountingSlurm()
    slurm.set_state("8", "PENDING", reason="Dependency")
    found = status(folder, slurm)
    assert found.state == "stopped"
    assert found.job_id == "8"
    assert slurm.queries == [["8"]]


def test_all_runs_are_asked_for_at_once(tmp_path):
    folders = []
    for number in range(5):
        one = RunFolder(tmp_path / f"run-{number}")
        one.path.mkdir()
        one.config_file.write_text("train: {steps: 4}\n")
        write(one, SUBMITTED | {"job_id": str(number)}, started(job_id=str(number)))
        folders.append(one)
    write(folders[0], ended("finished"))
    slurm = CountingSlurm()
    statuses(folders, slurm)
    assert slurm.queries == [["1", "2", "3", "4"]]


@pytest.mark.parametrize("state", sorted(ALL | {"UNKNOWN"}))
@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_that_slurm_says_makes_a_success(state, cancelled):
    for events in ([SUBMITTED], [SUBMITTED, started()], [SUBMITTED, started(), ended("stopped", "requeue")]):
        job = JobState(job_id="7", state=state)
        found = decide(fold(events), run="gpt", cancelled=cancelled, asked=True, job=job)
        assert found.state in STATES
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
        {"event": "saved", "time": 150.0, "attempt": 0, "step": 100, "seconds": 0.1},
        ended("failed", "requeue", code=137),
        started(1),
        {"event": "resumed", "time": 250.0, "attempt": 1, "step": 100},
    )
    for step in range(10, 140, 10):
        append_line(
            folder.metrics_file, {"step": step, "attempt": 0, "time": 120.0, "loss": 3.0, "tokens_per_s": 9.0}
        )
    append_line(folder.metrics_file, {"step": 100, "attempt": 0, "time": 120.0, "eval_loss": 2.5})
    slurm = FakeSlurm()
    slurm.set_state("7", "RUNNING")
    found = status(folder, slurm)
    assert (found.step, found.total_steps, found.attempts) == (100, 400, 2)
    assert (found.saved_step, found.saved, found.held_out) == (100, 150.0, 2.5)
    append_line(
        folder.metrics_file, {"step": 110, "attempt": 1, "time": 260.0, "loss": 2.0, "tokens_per_s": 11.0}
    )
    found = status(folder, slurm)
    assert (found.step, found.loss, found.rate, found.rate_unit) == (110, 2.0, 11.0, "tokens/s")
    assert (found.seen, found.nodes) == (260.0, "node[1-2]")


def test_nobody_knows_how_many_steps_a_script_of_ones_own_makes(folder):
    with folder.config_file.open("a") as stream:
        stream.write("program:\n  script: mine.py\n")
    write(folder, SUBMITTED, started())
    assert status(folder, None).total_steps is None


def test_a_failure_without_a_rank_names_the_setup_line_that_failed(folder):
    text = "The setup line `module load cuda` failed with code 1. The ranks start all the same."
    warning = {"event": "warned", "time": 115.0, "attempt": 0, "about": "setup", "text": text}
    write(folder, SUBMITTED, started(), warning, {**warning, "text": text.replace("cuda", "gcc")})
    assert "setup line" not in status(folder, None).detail
    write(folder, ended("failed", code=127))
    found = status(folder, None)
    assert found.detail.endswith("; before that, the setup line `module load cuda` failed with code 1")
    left = {"rank": 3, "host": "node4", "exit_code": 1, "signal": None}
    folder.log_dir(0).mkdir(parents=True)
    folder.failure_file(0).write_text(json.dumps(left))
    assert "setup line" not in status(folder, None).detail


def test_a_failure_names_rank_and_host(folder):
    write(folder, SUBMITTED, started(), ended("failed", code=1))
    folder.log_dir(0).mkdir(parents=True)
    folder.rank_log(0, 3).write_text("boom\n")
    left = {"rank": 3, "host": "node4", "exit_code": 1, "signal": None, "last_lines": ["boom"]}
    folder.failure_file(0).write_text(json.dumps(left))
    found = status(folder, None)
    assert "rank 3 on node4 ended with exit code 1" in found.detail
    assert found.failure is not None
    assert found.failure.last_lines == ("boom",)
    assert found.log == folder.rank_log(0, 3)
    assert f"slurmddp resume {folder.name}" in found.advice


def test_a_failure_file_that_is_half_written_is_passed_over(folder):
    write(folder, SUBMITTED, started(), ended("failed", code=1))
    folder.log_dir(0).mkdir(parents=True)
    folder.failure_file(0).write_text('{"rank": 3, "ho')
    assert status(folder, None).failure is None


def test_a_damaged_folder_is_told_and_stops_no_list(folder, tmp_path):
    folder.attempts_file.write_text("no json\n")
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    other.config_file.write_text("- a list\n")
    found = statuses([folder, other], FakeSlurm())
    assert [one.state for one in found] == ["unknown", "unknown"]
    assert "not JSON" in found[0].detail


@pytest.mark.parametrize(
    ("reason", "said", "advice"),
    [
        ("Priority", "other jobs", "when its turn comes"),
        ("(Resources)", "busy", "start sooner"),
        ("PartitionTimeLimit", "more time", "slurmddp resume gpt time_limit="),
        ("DependencyNeverSatisfied", "never lets it start", "slurmddp resume gpt"),
        ("QOSMaxGRESPerUser", "quality of service", "qos="),
        ("AssocGrpCPUMinutesLimit", "your account", "account="),
        ("ReqNodeNotAvail, UnavailableNodes:node[3-4]", "drained or reserved", "sinfo -R"),
        ("JobHeldUser", "held by you", "scontrol release 7"),
        ("launch failed requeued held", "could not start it", "scontrol release 7"),
        ("BeginTime", "its begin time has not come", "Nothing to do"),
        ("SomethingNew", "SomethingNew", ""),
        ("", "not looked at it yet", "Nothing to do"),
    ],
)
def test_reasons_are_explained(reason, said, advice):
    why, action = explain(reason, run="gpt", job_id="7")
    assert said in why
    assert advice in action


def test_a_job_that_was_put_back_says_when_it_starts_again():
    start = "2026-11-22 23:03:10"
    why, _ = explain("BeginTime", run="gpt", job_id="7", start=start, again=True)
    assert why == f"SLURM requeued it and starts it again at {start}"
    why, _ = explain("BeginTime", run="gpt", job_id="7", start=start)
    assert why == f"its begin time has not come (SLURM expects to start it at {start})"


def signalled(name, attempt=0):
    return {"event": "signalled", "time": 150.0, "attempt": attempt, "signal": name, "rank": 0}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([signalled("SIGTERM"), ended("stopped", "requeue", code=75)], "preempted, no save recorded"),
        (
            [signalled("SIGUSR2"), SAVED, ended("stopped", "requeue", code=75)],
            "time limit, last save at step 200",
        ),
        ([signalled("the time limit"), ended("stopped", "requeue", code=75)], "time limit, no save recorded"),
        (
            [signalled("/runs/gpt/stop"), SAVED, ended("stopped", code=75)],
            "on request, last save at step 200",
        ),
        ([SAVED], "SLURM took it off its nodes, last save at step 200"),
        ([ended("failed", "requeue", code=137)], "failed, exit code 137: rank 3 on node2"),
        (
            [FIRST_STEP, ended("failed", "requeue", code=137)],
            "failed, exit code 137, no save recorded: rank 3 on node2",
        ),
    ],
)
def test_how_the_attempt_before_ended_is_told(folder, events, said):
    write(folder, SUBMITTED, started(), *events, started(1))
    folder.log_dir(0).mkdir(parents=True)
    if "rank 3" in said:
        folder.failure_file(0).write_text(json.dumps({"rank": 3, "host": "node2", "signal": "SIGSEGV"}))
    found = status(folder, None)
    assert found.before.startswith(f"attempt 0 ended: {said}")
    assert found.state == "starting"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (None, "attempt 0 ended: stopped"),
        (1, "attempt 0 ended: stopped, 1 time limit in a row without a newer checkpoint"),
        (2, "attempt 0 ended: stopped, 2 time limits in a row without a newer checkpoint"),
    ],
)
def test_a_script_that_records_no_save_may_have_saved(folder, limits, said):
    end = ended("stopped", "requeue", code=75) | ({} if limits is None else {"without_progress": limits})
    write(folder, SUBMITTED, started(), end, started(1))
    assert status(folder, None).before == said


def test_an_attempt_that_starts_shows_the_step_it_goes_on_from_and_nothing_of_the_one_before(folder):
    write(folder, SUBMITTED, started(), FIRST_STEP, SAVED)
    append_line(
        folder.metrics_file, {"step": 217, "attempt": 0, "time": 190.0, "loss": 3.0, "tokens_per_s": 9.0}
    )
    write(folder, ended("failed", "requeue", code=137))
    assert (status(folder, None).step, status(folder, None).loss) == (217, 3.0)
    write(folder, started(1))
    found = status(folder, None)
    assert (found.state, found.step, found.loss, found.rate) == ("starting", 200, None, None)


def test_a_script_that_tells_no_first_step_runs_as_soon_as_it_has_started(folder):
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
    import time

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


def test_json_holds_only_what_json_can_say(folder):
    write(folder, SUBMITTED, started(), ended("failed", code=1))
    append_line(folder.metrics_file, {"step": 10, "attempt": 0, "time": 120.0, "loss": float("nan")})
    text = json.dumps(status(folder, None).as_json(), allow_nan=False)
    assert json.loads(text)["loss"] is None
    assert json.loads(text)["path"] == str(folder.path)
