"""`slurmddp resume`: an ended run starts again in its folder; an active or finished one is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slurmddp.cli.main import main
from slurmddp.control.start import StartedRun
from slurmddp.errors import EXIT_CONFIG, EXIT_RUN_STATE, EXIT_SLURM
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("command", ["cancel", "stop", "resume"])
def test_a_broken_line_of_the_record_stands_in_no_command_s_way(make_run, slurm, resumed, caplog, command):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "COMPLETED" if command == "resume" else "PENDING")
    folder.attempts_file.write_text("\0\0\nno JSON\n" + folder.attempts_file.read_text())
    assert main([command, "gpt"]) == 0
    assert "line 2 is not a JSON record and is skipped" in caplog.text
    assert len(resumed) == (command == "resume")
    assert slurm.states["7"].state == ("COMPLETED" if command == "resume" else "CANCELLED")


@pytest.fixture
def resumed(monkeypatch):
    jobs = []

    def job_of_run(folder, changes):
        program = SimpleNamespace(config={})
        return SimpleNamespace(run_name=folder.name, resumed=(folder, list(changes)), program=program)

    monkeypatch.setattr("slurmddp.control.resume.job_of_run", job_of_run)

    def start_claimed(job, claim, report):
        claimed = claim(job[0], None)
        claimed.lock.release()
        jobs.append(claimed.job.resumed)
        return [StartedRun(name="", path=claimed.job.resumed[0].path, outcome="submitted")]

    monkeypatch.setattr("slurmddp.control.resume.unused", lambda config, environ: [])
    monkeypatch.setattr("slurmddp.control.resume.start_claimed", start_claimed)
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
    output = capsys.readouterr().out
    assert f"{said} already" in output and "Nothing was started" in output
    assert main(["resume", "gpt", "time_limit=2h"]) == EXIT_RUN_STATE
    output = capsys.readouterr().err
    assert said in output and "The changes were not applied" in output
    assert resumed == []


def test_resume_of_a_run_that_nobody_sees_says_what_is_in_the_way(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "NO_SUCH_STATE")
    assert main(["resume", "gpt"]) == EXIT_SLURM
    assert "The state of job 7 of gpt-0a1b2c3d is not known" in capsys.readouterr().err
    folder.attempts_file.write_text("no JSON\n")
    assert main(["resume", "gpt"]) == EXIT_CONFIG
    assert "The state of gpt-0a1b2c3d is not known" in capsys.readouterr().err
    assert resumed == []


def test_resume_refuses_a_finished_run(make_run, slurm, resumed, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    end(folder, "finished")
    assert main(["resume", "gpt"]) == EXIT_RUN_STATE
    said = capsys.readouterr().err
    assert "has finished" in said and "`slurmddp rerun gpt-0a1b2c3d`" in said
    assert resumed == []
