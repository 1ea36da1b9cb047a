"""`slurmddp cancel | stop | resume`: how a person ends a run and lets it go on."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_RUN_STATE, EXIT_SLURM, SlurmError
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


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


@pytest.mark.parametrize("command", ["cancel", "stop", "resume"])
def test_a_broken_line_of_the_record_stands_in_no_command_s_way(make_run, slurm, resumed, caplog, command):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "COMPLETED" if command == "resume" else "PENDING")
    folder.attempts_file.write_text("\0\0\nno JSON\n" + folder.attempts_file.read_text())
    assert main([command, "gpt"]) == 0
    assert "line 2 is no record and is left out" in caplog.text
    assert len(resumed) == (command == "resume")
    assert slurm.states["7"].state == ("COMPLETED" if command == "resume" else "CANCELLED")


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


def test_cancel_reaches_a_local_run_that_ctrl_z_has_suspended(make_run, slurm):
    folder = make_run()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        local(folder, process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


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
    assert main(["status", "gpt"]) == 0
    said = capsys.readouterr().out
    assert "a person cancelled it; whether process" in said
    assert "can't be seen" in said


def test_cancel_of_a_local_run_that_proc_hides_tells_a_stranger_nothing(
    make_run, slurm, capsys, monkeypatch, tmp_path
):
    sent = []
    monkeypatch.setattr("slurmddp.host.process.PROC", tmp_path)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    local(make_run(), os.getpid())
    assert main(["cancel", "gpt"]) == 0
    assert set(sent) <= {0}
    assert "can't be seen from here" in capsys.readouterr().out


def test_cancel_of_another_account_s_local_run_says_who_can(make_run, slurm, capsys, monkeypatch):
    def refuse(pid, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    folder = make_run()
    local(folder, os.getpid())
    monkeypatch.setattr(os, "kill", refuse)
    assert main(["cancel", "gpt"]) == 0
    assert f"process {os.getpid()} belongs to another account" in capsys.readouterr().out
    assert folder.cancelled_file.exists()


def test_stop_leaves_a_file_and_says_what_will_happen(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "RUNNING")
    assert main(["stop", "gpt"]) == 0
    assert folder.stop_file.exists()
    said = capsys.readouterr().out
    assert "saves a checkpoint, ends with exit code 75 and is not requeued" in said
    assert f"slurmddp resume {folder.name}" in said
    assert main(["status", "gpt"]) == 0
    assert "starting: job 7, asked to stop" in capsys.readouterr().out
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


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_new_run_that_waits_is_stopped_by_leaving_the_queue(make_run, slurm, capsys, forgotten):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING")
    assert main(["stop", "gpt"]) == 0
    said = capsys.readouterr().out
    assert f"{folder.name} stays stopped: job 7 was taken out of the queue." in said
    assert slurm.states["7"].state == "CANCELLED" and folder.stop_file.exists()
    if forgotten:
        slurm.forget("7")
    assert main(["status", "gpt"]) == 0
    assert "stopped: it was stopped on request" in capsys.readouterr().out


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
    assert f"{folder.name} stays stopped: job 8 was taken out of the queue" in capsys.readouterr().out
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
        return SimpleNamespace(resumed=(folder, list(changes)), program=SimpleNamespace(config={}))

    monkeypatch.setattr("slurmddp.config.resume.job_of_run", job_of_run)
    monkeypatch.setattr("slurmddp.config.sbatch_environment.unused", lambda config, environ: [])
    monkeypatch.setattr("slurmddp.cli.start_run.start_job", lambda job, lock: jobs.append(job.resumed) or 0)
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


@pytest.mark.parametrize(("state", "said"), [("PENDING", "is queued"), ("RUNNING", "is starting")])
def test_resume_leaves_alone_what_is_still_there(make_run, slurm, resumed, capsys, state, said):
    submit(make_run())
    slurm.set_state("7", state)
    assert main(["resume", "gpt"]) == 0
    told = capsys.readouterr().out
    assert f"{said} already" in told and "Nothing was started twice" in told
    assert main(["resume", "gpt", "time_limit=2h"]) == EXIT_RUN_STATE
    told = capsys.readouterr().err
    assert said in told and "The changes were not applied" in told
    assert resumed == []


def test_resume_of_a_run_that_nobody_sees_says_what_is_in_the_way(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "NO_SUCH_STATE")
    assert main(["resume", "gpt"]) == EXIT_SLURM
    assert "Whether job 7 of gpt-0a1b2c3d still runs can't be seen" in capsys.readouterr().err
    folder.attempts_file.write_text("no JSON\n")
    assert main(["resume", "gpt"]) == EXIT_CONFIG
    assert "The state of gpt-0a1b2c3d is not known" in capsys.readouterr().err
    assert resumed == []


def test_resume_while_slurm_still_ends_the_cancelled_job_says_to_wait(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "COMPLETING")
    folder.cancelled_file.touch()
    folder.add_event("cancelled", job_id="7")
    assert main(["resume", "gpt"]) == EXIT_RUN_STATE
    assert resumed == []
    assert "Try again in a moment" in capsys.readouterr().err


def test_resume_refuses_a_finished_run(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main(["resume", "gpt"]) == EXIT_RUN_STATE
    assert "has finished" in capsys.readouterr().err
    assert resumed == []
