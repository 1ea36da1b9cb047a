"""`--json` of commands that start runs: the result alone on stdout, all other lines on stderr."""

from __future__ import annotations

import json

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.check import Checked
from slurmddp.control.json_encoding import from_json
from slurmddp.control.resume import resume
from slurmddp.control.start import Started, StartedRun
from slurmddp.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_USAGE
from support.runs.cli_runs import end, start
from support.runs.train_runs import BIG, only_run


@pytest.fixture
def result_of(capsys):
    """Run a command with `--json`; return its exit code, its result, and the lines on stderr."""

    def run(*words: str) -> tuple[int, Started, str]:
        capsys.readouterr()
        code = main([*words, "--json"])
        output = capsys.readouterr()
        return code, from_json(Started, json.loads(output.out)), output.err

    return run


def outcomes(started: Started) -> list[tuple[str, str | None]]:
    return [(run.outcome, run.job_id) for run in started.runs]


def test_a_submission_and_what_follows_it(project, cluster, result_of, capsys):
    code, started, lines = result_of("train", *BIG)
    folder = only_run(project)
    submitted = StartedRun(name=folder.name, path=folder.path, outcome="submitted", job_id="1")
    assert (code, started) == (0, Started(runs=(submitted,)))
    assert "job     1\n" in lines and "follow  slurmddp status" in lines

    code, started, lines = result_of("train", *BIG)
    assert outcomes(started) == [("active", "1")] and "is queued already" in lines
    assert slurmddp.train(*BIG).path == folder.path

    start(folder, job_id="1")
    end(folder, "stopped", code=EXIT_STOPPED, job_id="1")
    cluster.set_state("1", "COMPLETED")
    _, started, _ = result_of("resume", folder.name)
    assert outcomes(started) == [("submitted", "2")]
    assert resume(folder.name).runs[0].outcome == "active"

    code, started, lines = result_of("rerun", folder.name)
    assert outcomes(started) == [("submitted", "3")]
    assert main(["train", *BIG, "nodes=0", "--json"]) == EXIT_CONFIG
    assert capsys.readouterr().out == "", "an error has no result"


def test_the_runs_of_a_sweep_stand_in_the_order_of_its_points(project, cluster, result_of, capsys):
    _, started, lines = result_of("train", *BIG, "-m", "seed=3,1,2", "nodes=1,2")
    assert started.sweep is not None and started.sweep in lines
    assert outcomes(started) == [("submitted", f"{array}_{index}") for index in range(3) for array in (1, 2)]
    assert main(["resume", started.sweep, "--check", "--json"]) == 0
    output = capsys.readouterr()
    assert from_json(Checked, json.loads(output.out)).jobs == () and "is queued already" in output.err
    _, resumed, _ = result_of("resume", started.sweep)
    assert [run.name for run in resumed.runs] == [run.name for run in started.runs]
    assert {run.outcome for run in resumed.runs} == {"active"}


def test_a_training_here_has_its_exit_code(project, here, result_of):
    here.ends = staticmethod(lambda: EXIT_STOPPED)
    code, started, lines = result_of("train")
    assert code == EXIT_STOPPED and "Stopped at step 40" in lines
    assert [(run.outcome, run.exit_code) for run in started.runs] == [("trained", EXIT_STOPPED)]


@pytest.mark.parametrize("flag", ["--cfg", "--info"])
@pytest.mark.parametrize("command", [["train"], ["train", "-m", "seed=1,2"], ["run", "train.py"]])
def test_a_script_or_a_configuration_is_no_json(project, capsys, command, flag):
    assert main([command[0], "--json", flag, *command[1:]]) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.out == "" and f"Omit --json or {flag}" in output.err


def test_a_call_from_python_prints_nothing_and_warns_of_what_the_command_prints(
    project, cluster, caplog, capsys
):
    run = slurmddp.train(*BIG)
    (project / "my_data.py").touch()
    slurmddp.train(*BIG)
    assert f"{run.name}: my_data.py has changed since this run" in caplog.messages[-1]
    start(only_run(project), job_id="1")
    end(only_run(project), "finished", job_id="1")
    cluster.set_state("1", "COMPLETED")
    slurmddp.train(*BIG)
    assert caplog.messages[-1].endswith("again=True runs the new code.")
    run = slurmddp.submit("math.sqrt", 2, cluster="big")
    assert f"{run.name}: if math.sqrt saves checkpoints without Distributon, name them" in caplog.messages[-1]
    assert capsys.readouterr() == ("", "")
