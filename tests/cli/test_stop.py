"""`slurmddp stop`: a run saves and stays stopped."""

from __future__ import annotations

import json

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.json_encoding import from_json
from slurmddp.control.stop import Stopped
from slurmddp.errors import SlurmError
from support.runs.cli_runs import end, local_process, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


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


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("time limit", "its time limit came, it stopped and"),
        ("preempted", "it was preempted, it stopped and"),
    ],
)
def test_a_run_that_nothing_starts_again_says_why_it_stopped(make_run, slurm, capsys, reason, told):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "stopped", code=75, reason=reason)
    assert main(["status", "gpt"]) == 0
    assert f"stopped: {told} nothing will start it again" in capsys.readouterr().out
    assert main(["list"]) == 0
    assert f" stopped ({reason}) " in capsys.readouterr().out
    folder.stop_file.touch()
    assert main(["list"]) == 0
    assert " stopped (on request) " in capsys.readouterr().out


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
    with local_process(folder) as process:
        assert main(["stop", "gpt"]) == 0
        assert process.poll() is None
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


@pytest.mark.parametrize("command", ["stop", "cancel"])
def test_a_finished_run_has_nothing_to_stop_or_cancel(make_run, slurm, capsys, command):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main([command, "gpt"]) == 0
    assert f"nothing to {command}: it is finished" in capsys.readouterr().out
    assert not folder.stop_file.exists() and not folder.cancelled_file.exists()


def test_stop_while_slurm_is_silent_says_that_it_is_not_sure(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.silence = "Unable to contact slurm controller."
    assert main(["stop", "gpt"]) == 0
    assert folder.stop_file.exists()
    said = capsys.readouterr().out
    assert "Unable to contact" in said and "If it is queued, it ends as soon as it starts." in said
    slurm.silence = ""
    slurm.set_state("7", "PENDING", reason="Resources")
    assert main(["status", "gpt"]) == 0
    said = capsys.readouterr().out
    assert "queued: job 7 waits: the nodes that it needs are busy, asked to stop" in said
    assert f"`slurmddp stop {folder.name}` once more takes its job out of the queue" in said
    assert main(["stop", "gpt"]) == 0
    assert "job 7 was taken out of the queue" in capsys.readouterr().out


def test_a_stopped_run_that_slurm_requeued_is_not_lost(make_run, slurm, capsys):
    """Preempted while it was stopping: the script started again, found the file and left at once."""
    folder = make_run()
    submit(folder)
    start(folder)
    folder.stop_file.touch()
    slurm.set_state("7", "COMPLETED")
    assert main(["status", "gpt"]) == 0
    assert "stopped: it was stopped on request" in capsys.readouterr().out


def test_python_and_json_give_what_became_of_a_run(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING")
    stopped = slurmddp.Run(folder.path).stop()
    assert capsys.readouterr().out == ""
    assert (stopped.outcome, stopped.state, stopped.jobs) == ("dequeued", "queued", ("7",))
    assert not stopped.has_saved and stopped.error == ""

    assert main(["stop", "gpt", "--json"]) == 0
    result = from_json(Stopped, json.loads(capsys.readouterr().out))
    assert (result.name, result.is_sweep) == (folder.name, False)
    assert [(run.outcome, run.state) for run in result.runs] == [("inactive", "stopped")]


def test_python_gets_what_a_running_program_will_do(make_run, slurm):
    folder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "RUNNING")
    stopped = slurmddp.Run(folder.path).stop()
    assert (stopped.outcome, stopped.is_script, stopped.jobs) == ("asked", False, ())
