"""`slurmddp list | status | logs | cancel | resume | report`, by run name from any folder."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from slurmddp.cli import logs as logs_command
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NO_RUN, EXIT_SLURM, SlurmError
from slurmddp.runs import index
from slurmddp.runs.folder import RunFolder, append_line
from slurmddp.runs.table import duration, number, percent, print_table
from slurmddp.slurm.fake import FakeSlurm
from slurmddp.slurm.states import JobState

CONFIG = """\
name: gpt
nodes: 2
ranks_per_node: 2
train:
  steps: 400
"""


@pytest.fixture
def slurm(monkeypatch):
    fake = FakeSlurm()
    for command in ("list", "status", "logs", "stop", "cancel", "resume"):
        monkeypatch.setattr(f"slurmddp.cli.{command}.SlurmClient", lambda: fake)
    return fake


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def make_run(tmp_path):
    def make(name="gpt-0a1b2c3d"):
        folder = RunFolder(tmp_path / "project" / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.config_file.write_text(CONFIG)
        index.remember(folder)
        return folder

    return make


def submit(folder, job_id="7"):
    folder.add_event("submitted", job_id=job_id, submitter="sbatch")


def start(folder, attempt=0, job_id="7"):
    folder.log_dir(attempt).mkdir(parents=True)
    folder.add_event(
        "started", attempt=attempt, job_id=job_id, restart_count=attempt, nodes="node[1-2]", launcher="slurm"
    )


def end(folder, outcome, attempt=0, code=0, next_="none"):
    folder.add_event("ended", attempt=attempt, job_id="7", exit_code=code, outcome=outcome, next=next_)


def test_list_shows_every_run(make_run, slurm, capsys):
    first, second = make_run("gpt-00000001"), make_run("resnet-00000002")
    submit(first)
    slurm.set_state("7", "PENDING", reason="Priority")
    submit(second, "8")
    start(second, job_id="8")
    end(second, "finished")
    append_line(second.metrics_file, {"step": 400, "attempt": 0, "time": 1.0, "loss": 1.5})
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert lines[0].split() == ["NAME", "STATE", "STEP", "LOSS", "JOB", "AGE", "FOLDER"]
    assert "queued" in rows["gpt-00000001"]
    assert "finished" in rows["resnet-00000002"]
    assert "400/400" in rows["resnet-00000002"]
    assert "1.5000" in rows["resnet-00000002"]


def test_list_as_json_is_for_programs(make_run, slurm, capsys):
    submit(make_run())
    assert main(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["state"], row["job_id"]) == ("gpt-0a1b2c3d", "lost", "7")


def test_list_is_limited_and_says_so(make_run, slurm, capsys):
    for number_ in range(3):
        make_run(f"gpt-0000000{number_}")
    assert main(["list", "-n", "2"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "1 more" in err
    assert main(["list", "-n", "2", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_list_without_runs_says_how_to_start_one(slurm, capsys):
    assert main(["list"]) == 0
    assert "slurmddp train" in capsys.readouterr().err
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_status_of_the_newest_run_by_default(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING", reason="PartitionTimeLimit")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert folder.name in out
    assert re.search(r"state +queued: job 7 waits: it asks for more time", out)
    assert "time_limit=" in out


def test_status_shows_the_failing_rank(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    folder.rank_log(0, 3).write_text("boom\n")
    left = {"rank": 3, "host": "node4", "exit_code": None, "signal": "SIGKILL", "last_lines": ["boom"]}
    folder.failure_file(0).write_text(json.dumps(left))
    end(folder, "failed", code=137)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 on node4 was killed by SIGKILL" in out
    assert "| boom" in out
    assert str(folder.rank_log(0, 3)) in out
    assert "exit code 137 (failed)" in out


def test_status_names_the_nodes_that_the_run_avoids(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    append_line(folder.excluded_file, {"time": 1, "node": "node9", "reason": "", "expires": 2})
    assert main(["status"]) == 0
    assert "avoids" not in capsys.readouterr().out
    append_line(folder.excluded_file, {"time": 1, "node": "node7", "reason": "", "expires": 9e9})
    assert main(["status"]) == 0
    assert "avoids     node7: failed under it\n" in capsys.readouterr().out


def test_status_shows_why_no_rank_started(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    (folder.log_dir(0) / "node-1.log").write_text("execve(): /no/such/python: No such file or directory\n")
    (folder.log_dir(0) / "batch.log").write_text("srun ended with code 2.\n")
    end(folder, "failed", code=2)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "| [node 1] execve(): /no/such/python" in out
    assert "| [batch] srun ended with code 2." in out


def test_a_job_of_another_run_that_has_the_same_id_is_left_alone(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.states["7"] = JobState(job_id="7", state="RUNNING", run="other-11111111")
    assert main(["status", "gpt"]) == 0
    assert "SLURM no longer knows job 7" in capsys.readouterr().out
    folder.add_event("submitted", job_id="8", submitter="sbatch")
    slurm.states["8"] = JobState(job_id="8", state="RUNNING", run=folder.name)
    assert main(["cancel", "gpt"]) == 0
    assert {job: slurm.states[job].state for job in "78"} == {"7": "RUNNING", "8": "CANCELLED"}


def trained(folder):
    """Two attempts: one that failed after a save, one that runs."""
    facts = {"job_id": "7", "launcher": "slurm", "nodes": "node[1-2]"}
    for event in (
        {"event": "submitted", "time": 1000.0, "job_id": "7"},
        {"event": "started", "time": 1010.0, "attempt": 0, **facts},
        {"event": "first_step", "time": 1020.0, "attempt": 0, "step": 1},
        {"event": "saved", "time": 1142.0, "attempt": 0, "step": 20, "seconds": 2.0},
        {"event": "rank_failed", "time": 1160.0, "attempt": 0, "rank": 1, "host": "node1"},
        {"event": "ended", "time": 1161.0, "attempt": 0, **facts, "outcome": "failed", "next": "requeue"},
        {"event": "started", "time": 1170.0, "attempt": 1, **facts},
        {"event": "resumed", "time": 1178.0, "attempt": 1, "step": 20},
    ):
        append_line(folder.attempts_file, event)
    return {
        "event": "first_step",
        "time": 1180.0,
        "attempt": 1,
        "step": 21,
        "phases": {"imports": 4.0, "rendezvous": 0.5, "first_step": 1.5, "odd": "x"},
    }


END = {"event": "ended", "attempt": 1, "job_id": "7", "exit_code": 0, "outcome": "finished", "next": "none"}


def test_status_tells_what_the_time_went_into(make_run, slurm, capsys):
    folder = make_run()
    for event in (trained(folder), {**END, "time": 1240.0}):
        append_line(folder.attempts_file, event)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    said = "75 % (81 % of the time on nodes): 3m 00s training, 20s starting, 19s queued, 18s lost, 2s saving"
    assert re.search(r"goodput +(.*)", out)[1] == f"{said}, 1s ending"
    assert "ATTEMPT" not in out
    assert main(["status", "-v", "gpt"]) == 0
    rows = [
        line.split("  ") for line in capsys.readouterr().out.partition("Where the time went")[2].splitlines()
    ]
    table = [[cell.strip() for cell in row if cell] for row in rows]
    assert ["ATTEMPT", "WHOLE", "TRAINING", "SAVING", "LOST", "STARTING", "ENDING", "QUEUED"] in table
    assert ["0", "2m 41s", "2m 00s", "2.0s", "18s", "10s", "1.0s", "10s"] in table
    assert ["1", "1m 19s", "1m 00s", "10s", "9.0s"] in table
    assert ["all", "4m 00s", "3m 00s", "2.0s", "18s", "20s", "1.0s", "19s"] in table
    assert ["Start of attempt 1, 10.00 s to its first step"] in table
    for row in (["launch", "4.00"], ["imports", "4.00"], ["rendezvous", "0.50"], ["first step", "1.50"]):
        assert row in table
    assert not [row for row in table if "odd" in row]


def test_the_phases_of_a_start_come_with_its_first_step(make_run, slurm, capsys):
    folder = make_run()
    first_step = trained(folder)
    append_line(folder.attempts_file, {**first_step, "attempt": 0})
    slurm.set_state("7", "RUNNING")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "ATTEMPT" in out
    assert "PHASE" not in out, "those of an earlier attempt would be taken for its own"
    append_line(folder.attempts_file, first_step)
    assert main(["status", "-v", "gpt"]) == 0
    assert "Start of attempt 1" in capsys.readouterr().out


def test_the_goodput_of_a_program_that_tells_nothing_is_not_known(make_run, slurm, capsys):
    folder = make_run()
    folder.config_file.write_text("name: gpt\nprogram: {script: train.py}\n")
    append_line(folder.attempts_file, {"event": "started", "time": 1000.0, "attempt": 1, "job_id": "7"})
    append_line(folder.attempts_file, {**END, "time": 1060.0})
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"goodput +not known, for the program does not tell its first step: 1m 00s untold", out)


def test_status_of_a_damaged_record_says_nothing_of_its_time(make_run, slurm, capsys):
    folder = make_run()
    folder.attempts_file.write_text("no JSON\n")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "unknown: the run folder can't be read" in out
    assert "goodput" not in out
    assert main(["status", "--json", "gpt"]) == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["parts"] == {}


def test_the_times_as_json(make_run, slurm, capsys):
    folder = make_run()
    for event in (trained(folder), {**END, "time": 1240.0}):
        append_line(folder.attempts_file, event)
    assert main(["status", "gpt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ledger"]["goodput"], found["ledger"]["whole"]) == (0.75, 240.0)
    assert found["ledger"]["attempts"][0]["parts"]["lost"] == 18.0
    assert found["phases"]["attempt"] == 1
    assert list(found["phases"]["seconds"]) == ["launch", "imports", "rendezvous", "first_step"]


def test_status_as_json(make_run, slurm, capsys):
    submit(make_run())
    assert main(["status", "gpt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "lost"
    assert found["total_steps"] == 400


@pytest.mark.parametrize("command", ["status", "logs", "stop", "cancel", "resume", "report"])
def test_an_unknown_run_is_an_error_with_near_names(make_run, slurm, command, capsys):
    make_run()
    assert main([command, "gtp-0a1b2c3d"]) == EXIT_NO_RUN
    assert "Did you mean gpt-0a1b2c3d?" in capsys.readouterr().err


def logged(folder):
    submit(folder)
    start(folder)
    for rank in range(2):
        folder.rank_log(0, rank).write_text("".join(f"line {at} of {rank}\n" for at in range(100)))


def test_logs_show_rank_0(make_run, slurm, capsys):
    logged(make_run())
    assert main(["logs", "gpt", "-n", "2"]) == 0
    assert capsys.readouterr().out == "[rank 0] line 98 of 0\n[rank 0] line 99 of 0\n"


@pytest.mark.parametrize(
    ("flags", "count"), [([], 40), (["-n", "all"], 100), (["--all", "-n", "1"], 2), (["--rank", "1"], 40)]
)
def test_logs_of_the_wanted_lines_and_ranks(make_run, slurm, capsys, flags, count):
    logged(make_run())
    assert main(["logs", "gpt", *flags]) == 0
    assert len(capsys.readouterr().out.splitlines()) == count


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attempt", "3"], "no attempt 3"),
        (["--rank", "7"], "no log of rank 7"),
        (["-n", "many"], "'many'"),
    ],
)
def test_logs_that_are_not_there(make_run, slurm, capsys, flags, said):
    logged(make_run())
    assert main(["logs", "gpt", *flags]) == EXIT_CONFIG
    assert said in capsys.readouterr().err


def test_logs_before_the_first_attempt_say_what_it_waits_for(make_run, slurm, capsys):
    submit(make_run())
    slurm.set_state("7", "PENDING", reason="Resources")
    assert main(["logs", "gpt"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "nodes it needs are busy" in err


def test_following_an_ended_run_shows_its_end(make_run, slurm, capsys):
    folder = make_run()
    logged(folder)
    end(folder, "finished")
    assert main(["logs", "-f", "gpt", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] line 99 of 0",
        "-- attempt 0: finished, exit code 0",
        "-- finished: all steps are done",
    ]


def test_following_ends_when_slurm_has_lost_the_job(make_run, slurm, capsys):
    logged(make_run())
    assert main(["logs", "-f", "gpt", "-n", "1"]) == 0
    assert "-- lost: SLURM no longer knows job 7" in capsys.readouterr().out


def test_following_asks_slurm_seldom(make_run, slurm):
    folder = make_run()
    logged(folder)
    slurm.set_state("7", "RUNNING")
    now = 0.0
    queries = []
    slurm.jobs = lambda ids: queries.append(now) or {"7": slurm.states["7"]}
    has_ended = logs_command.end_of(folder, slurm, clock=lambda: now)
    while now < 300:
        assert not has_ended()
        now += 1.0
    assert len(queries) == 10


def test_cancel_marks_the_run_before_it_ends_the_job(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING")
    marked = []
    real_cancel = slurm.cancel
    slurm.cancel = lambda job_id: (marked.append(folder.cancelled_file.exists()), real_cancel(job_id))
    assert main(["cancel", "gpt"]) == 0
    assert marked == [True]
    assert slurm.states["7"].state == "CANCELLED"
    assert [event["event"] for event in folder.events()] == ["submitted", "cancelled"]
    assert "job 7 was told to end" in capsys.readouterr().out


def test_cancel_of_a_damaged_record_changes_nothing(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "RUNNING")
    folder.attempts_file.write_text("no JSON\n" + folder.attempts_file.read_text())
    assert main(["cancel", "gpt"]) != 0
    assert "attempts.jsonl" in capsys.readouterr().err
    assert not folder.cancelled_file.exists()
    assert slurm.states["7"].state == "RUNNING"


def test_cancel_ends_every_job_that_is_left_and_no_other(make_run, slurm):
    folder = make_run()
    submit(folder, "6")
    start(folder, job_id="6")
    folder.add_event("ended", attempt=0, job_id="6", exit_code=75, outcome="stopped", next="resubmit")
    submit(folder, "7")
    for job_id in "678":
        slurm.set_state(job_id, "RUNNING")
    assert main(["cancel", "gpt"]) == 0
    assert {job_id: job.state for job_id, job in slurm.states.items()} == {
        "6": "RUNNING",  # It has ended; who bears this number now is somebody else.
        "7": "CANCELLED",
        "8": "RUNNING",
    }


def test_cancel_catches_a_resubmission_on_its_way(make_run, slurm):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "RUNNING")
    real_cancel = slurm.cancel

    def cancel(job_id):
        if job_id == "7":
            slurm.set_state("8", "PENDING")
            submit(folder, "8")
        real_cancel(job_id)

    slurm.cancel = cancel
    assert main(["cancel", "gpt"]) == 0
    assert slurm.states["8"].state == "CANCELLED"


def test_nothing_to_cancel(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main(["cancel", "gpt"]) == 0
    assert "nothing to cancel: it is finished" in capsys.readouterr().out
    assert not folder.cancelled_file.exists()


def test_a_cancel_that_slurm_does_not_hear_keeps_the_mark_and_is_an_error(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.silence = "Unable to contact slurm controller."
    assert main(["cancel", "gpt"]) == EXIT_SLURM
    assert folder.cancelled_file.exists()
    err = capsys.readouterr().err
    assert "job 7 may still be there" in err
    assert "Unable to contact" in err
    slurm.silence = ""
    slurm.set_state("7", "RUNNING")
    assert main(["cancel", "gpt"]) == 0
    assert slurm.states["7"].state == "CANCELLED"


def local(folder, pid, host=None):
    folder.log_dir(0).mkdir(parents=True)
    folder.add_event(
        "started",
        attempt=0,
        job_id="local-1",
        launcher="local",
        pid=pid,
        host=host or socket.gethostname(),
        nodes="here",
    )


def test_cancel_of_a_local_run_tells_its_process(make_run, slurm, capsys):
    folder = make_run()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        local(folder, process.pid)
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert f"process {process.pid} was told to save and stop" in capsys.readouterr().out


def test_a_cancelled_local_run_that_does_not_leave_is_killed_by_a_second_cancel(make_run, slurm, capsys):
    folder = make_run()
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job inherits it as ignored\n"
        "print('deaf', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"deaf\n"
        local(folder, process.pid)
        assert main(["cancel", "gpt"]) == 0
        capsys.readouterr()
        assert main(["status", "gpt"]) == 0
        said = capsys.readouterr().out
        assert f"process {process.pid} is to save and leave" in said and "once more kills it" in said
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(30) == -signal.SIGINT
        assert "told to end at once" in capsys.readouterr().out
        assert main(["status", "gpt"]) == 0
        assert "a person cancelled it" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("saved", [True, False])
def test_a_stop_is_called_one_at_a_checkpoint_only_if_there_is_one(make_run, slurm, capsys, saved):
    folder = make_run()
    submit(folder)
    start(folder)
    if saved:
        folder.add_event("saved", attempt=0, step=3)
    end(folder, "stopped", code=75)
    assert main(["status", "gpt"]) == 0
    assert ("at a checkpoint" in capsys.readouterr().out) == saved


def test_cancel_of_a_local_run_elsewhere_says_where(make_run, slurm, capsys):
    local(make_run(), 123, host="laptop-of-ann")
    assert main(["cancel", "gpt"]) == 0
    assert "process 123 on laptop-of-ann" in capsys.readouterr().out


def test_stop_leaves_a_file_and_says_what_will_happen(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "RUNNING")
    assert main(["stop", "gpt"]) == 0
    assert folder.stop_file.exists()
    said = capsys.readouterr().out
    assert "saves a checkpoint, ends with exit code 75 and is not put back" in said
    assert f"slurmddp resume {folder.name}" in said
    assert main(["status", "gpt"]) == 0
    assert "running: job 7, asked to stop" in capsys.readouterr().out
    end(folder, "stopped", code=75)
    assert main(["status", "gpt"]) == 0
    said = capsys.readouterr().out
    assert "stopped: it was stopped on request" in said
    assert f"slurmddp resume {folder.name}" in said


def test_stop_of_a_local_run_is_the_same_file(make_run, slurm, capsys):
    folder = make_run()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        local(folder, process.pid)
        assert main(["stop", "gpt"]) == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert folder.stop_file.exists()
    assert "within seconds" in capsys.readouterr().out


def test_stop_of_a_run_that_waits_points_to_cancel(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING")
    assert main(["stop", "gpt"]) == EXIT_CONFIG
    assert f"slurmddp cancel {folder.name}" in capsys.readouterr().err
    assert not folder.stop_file.exists()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_run_that_waits_to_go_on_is_stopped_by_leaving_the_queue(make_run, slurm, capsys, forgotten):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "stopped", code=75, next_="resubmit")
    submit(folder, "8")
    slurm.set_state("7", "COMPLETED")
    slurm.set_state("8", "PENDING", reason="Dependency")
    assert main(["stop", "gpt"]) == 0
    assert "has saved and stays stopped: job 8 was taken out of the queue" in capsys.readouterr().out
    assert slurm.states["8"].state == "CANCELLED"
    if forgotten:
        slurm.forget("8")
    assert main(["status", "gpt"]) == 0
    assert "stopped: it was stopped on request" in capsys.readouterr().out
    assert main(["stop", "gpt"]) == 0
    assert "nothing to stop" in capsys.readouterr().out


def test_a_run_that_waits_stays_stopped_though_slurm_does_not_take_its_job_away(
    make_run, slurm, capsys, monkeypatch
):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "stopped", code=75, next_="requeue")
    slurm.set_state("7", "PENDING")

    def refuse(job_id):
        raise SlurmError("Unable to contact slurm controller.")

    monkeypatch.setattr(slurm, "cancel", refuse)
    assert main(["stop", "gpt"]) == 0
    said = capsys.readouterr().out
    assert "job 7 may still be in the queue: Unable to contact" in said
    assert "it ends at once" in said
    assert folder.stop_file.exists()


def test_nothing_to_stop(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main(["stop", "gpt"]) == 0
    assert "nothing to stop: it is finished" in capsys.readouterr().out
    assert not folder.stop_file.exists()


def test_stop_while_slurm_is_silent_says_that_it_is_not_sure(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.silence = "Unable to contact slurm controller."
    assert main(["stop", "gpt"]) == 0
    assert folder.stop_file.exists()
    assert "Unable to contact" in capsys.readouterr().out


def test_a_stopped_run_that_slurm_put_back_is_not_lost(make_run, slurm, capsys):
    """Preempted while it was stopping: the script started again, found the file and left at once."""
    folder = make_run()
    submit(folder)
    start(folder)
    folder.stop_file.touch()
    slurm.set_state("7", "COMPLETED")
    assert main(["status", "gpt"]) == 0
    assert "stopped: it was stopped on request" in capsys.readouterr().out


@pytest.fixture
def resumed(monkeypatch):
    jobs = []

    def job_of_run(folder, changes):
        return folder, list(changes)

    monkeypatch.setattr("slurmddp.config.job_of_run", job_of_run)
    monkeypatch.setattr("slurmddp.cli.train.start_job", lambda job: jobs.append(job) or 0)
    return jobs


@pytest.mark.parametrize("outcome", ["stopped", "failed", "cancelled", "config", "no_progress"])
def test_resume_goes_on_in_the_same_folder(make_run, slurm, resumed, outcome):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, outcome, code=75)
    assert main(["resume", "gpt", "partition=high", "time_limit=2h"]) == 0
    ((found, changes),) = resumed
    assert (found.path, changes) == (folder.path, ["partition=high", "time_limit=2h"])


@pytest.mark.parametrize(
    ("state", "said"),
    [("PENDING", "is queued"), ("RUNNING", "is running"), ("NO_SUCH_STATE", "is unknown")],
)
def test_resume_refuses_what_is_still_there(make_run, slurm, resumed, capsys, state, said):
    submit(make_run())
    slurm.set_state("7", state)
    assert main(["resume", "gpt"]) == EXIT_CONFIG
    assert said in capsys.readouterr().err
    assert resumed == []


def test_resume_while_slurm_still_ends_the_cancelled_job_says_to_wait(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "COMPLETING")
    folder.cancelled_file.touch()
    folder.add_event("cancelled", job_id="7")
    assert main(["resume", "gpt"]) == EXIT_CONFIG
    assert resumed == []
    assert "Try again in a moment" in capsys.readouterr().err


def test_resume_refuses_a_finished_run(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main(["resume", "gpt"]) == EXIT_CONFIG
    assert "has finished" in capsys.readouterr().err
    assert resumed == []


def test_report_is_written_again(make_run, slurm, capsys):
    folder = make_run()
    assert main(["report", "gpt"]) == 0
    assert capsys.readouterr().out == f"{folder.report_file}\n"
    assert folder.report_file.exists()


def test_a_report_that_cannot_be_written_is_an_error(make_run, slurm, capsys):
    folder = make_run()
    folder.report_file.mkdir()
    assert main(["report", "gpt"]) == EXIT_FAILED
    assert "can't be written" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_are_plain_in_a_pipe_and_dressed_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    rows = [("gpt", "failed", "10"), ("[bold]resnet", "running", "9")]
    plain, dressed = io.StringIO(), Terminal()
    for stream in (plain, dressed):
        print_table(
            ("NAME", "STATE", "STEP"), rows, stream, right=frozenset({"STEP"}), styles=["red", "green"]
        )
    assert plain.getvalue() == (
        "NAME          STATE    STEP\ngpt           failed     10\n[bold]resnet  running     9\n"
    )
    assert "\x1b[" in dressed.getvalue()
    assert "[bold]resnet" in dressed.getvalue()


def test_a_table_that_stays_whole_is_not_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    stream = Terminal()
    print_table(("ATTEMPT", "TRAINING"), [("0", "2m 00s")], stream, right=frozenset({"TRAINING"}), whole=True)
    assert re.sub(r"\x1b\[\d+m", "", stream.getvalue()) == "ATTEMPT  TRAINING\n0          2m 00s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-3, "0s"), (41.4, "41s"), (185, "3m 05s"), (7620, "2h 07m"), (273600, "3d 04h")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-9, "< 1 %"),
        (0.0051, "1 %"),
        (0.874, "87 %"),
        (0.9999, "99 %"),
        (1.0, "100 %"),
        (1.0000001, "100 %"),
    ],
)
def test_only_all_of_it_is_a_hundred_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.0000"),
        (1.23456, "1.2346"),
        (1e-6, "1.00e-06"),
        (3e9, "3.00e+09"),
        (float("nan"), "nan"),
    ],
)
def test_losses_read_well(value, text):
    assert number(value) == text


def test_finding_a_run_imports_no_torch():
    code = (
        "import sys\n"
        "from slurmddp.cli import cancel, list, logs, report, resume, status\n"
        "import slurmddp.runs.report\n"
        "heavy = {'torch', 'matplotlib', 'jinja2', 'hydra', 'rich', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"
