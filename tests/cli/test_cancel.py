"""`slurmddp cancel`: a run is marked, and its jobs or its process end."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.cancel import Cancelled
from slurmddp.control.json_encoding import from_json
from slurmddp.errors import EXIT_SLURM
from slurmddp.slurm.states import JobState
from support.runs.cli_runs import local_process, start, start_here, submit

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
    assert "is cancelled (job 7)" in capsys.readouterr().out


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


def test_a_cancel_that_slurm_does_not_hear_keeps_the_mark_and_is_an_error(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.silence = "Unable to contact slurm controller."
    assert main(["cancel", "gpt"]) == EXIT_SLURM
    assert folder.cancelled_file.exists()
    err = capsys.readouterr().err
    assert "job 7 may still be in SLURM" in err
    assert "Unable to contact" in err
    slurm.silence = ""
    slurm.set_state("7", "RUNNING")
    assert main(["cancel", "gpt"]) == 0
    assert slurm.states["7"].state == "CANCELLED"


def test_cancel_needs_no_accounting(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.states["7"] = JobState(job_id="7", state="UNKNOWN", error="sacct failed: no database.")
    assert main(["cancel", "gpt"]) == 0
    assert capsys.readouterr().out == f"{folder.name} is cancelled; it had no job in SLURM.\n"


def test_cancel_of_a_local_run_tells_its_process(make_run, slurm, capsys):
    folder = make_run()
    with local_process(folder) as process:
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(120) == -signal.SIGTERM
    assert f"process {process.pid} saves a checkpoint and stops" in capsys.readouterr().out


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
        start_here(folder, process.pid)
        assert main(["cancel", "gpt"]) == 0
        capsys.readouterr()
        assert main(["status", "gpt"]) == 0
        said = capsys.readouterr().out
        assert f"process {process.pid} saves and ends" in said and "once more kills it" in said
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(120) == -signal.SIGINT
        assert "ends at once" in capsys.readouterr().out
        assert main(["status", "gpt"]) == 0
        assert "a person cancelled it" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_cancel_reaches_a_local_run_that_ctrl_z_has_suspended(make_run, slurm):
    folder = make_run()
    with local_process(folder) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert main(["cancel", "gpt"]) == 0
        assert process.wait(120) == -signal.SIGTERM


def test_cancel_of_a_local_run_elsewhere_says_where(make_run, slurm, capsys):
    start_here(make_run(), 123, host="laptop-of-ann")
    assert main(["cancel", "gpt"]) == 0
    assert "process 123 on laptop-of-ann" in capsys.readouterr().out
    assert main(["status", "gpt"]) == 0
    said = capsys.readouterr().out
    assert "a person cancelled it; from this machine" in said
    assert "can't be seen" in said


def test_cancel_of_a_local_run_that_proc_hides_tells_a_stranger_nothing(
    make_run, slurm, capsys, monkeypatch, tmp_path
):
    sent = []
    monkeypatch.setattr("slurmddp.host.process.PROC", tmp_path)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    start_here(make_run(), os.getpid())
    assert main(["cancel", "gpt"]) == 0
    assert set(sent) <= {0}
    assert "is not visible to this shell" in capsys.readouterr().out


def test_cancel_of_another_account_s_local_run_says_who_can(make_run, slurm, capsys, monkeypatch):
    def refuse(pid, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    folder = make_run()
    start_here(folder, os.getpid())
    monkeypatch.setattr(os, "kill", refuse)
    assert main(["cancel", "gpt"]) == 0
    assert f"process {os.getpid()} belongs to another account" in capsys.readouterr().out
    assert folder.cancelled_file.exists()


def test_python_and_json_give_what_became_of_a_run(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING")
    cancelled = slurmddp.Run(folder.path).cancel()
    assert capsys.readouterr().out == ""
    assert (cancelled.name, cancelled.path, cancelled.state) == (folder.name, folder.path, "queued")
    assert cancelled.cancelled and cancelled.jobs == ("7",) and cancelled.process is None

    assert main(["cancel", "gpt", "--json"]) == 0
    (again,) = from_json(Cancelled, json.loads(capsys.readouterr().out)).runs
    assert again.state == "cancelled" and not again.cancelled and again.jobs == ()


def test_python_gets_the_process_of_a_local_run(make_run, slurm):
    folder = make_run()
    with local_process(folder) as process:
        cancelled = slurmddp.Run(folder.path).cancel()
        assert process.wait(120) == -signal.SIGTERM
    assert cancelled.process is not None
    assert (cancelled.process.pid, cancelled.process.outcome) == (process.pid, "stopping")
