"""`slurmddp resume RUN train.steps=...`: an existing run trains longer, in its folder and under its name."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, EXIT_RUN_STATE, EXIT_STOPPED
from support.runs.cli_runs import end, start
from support.runs.train_runs import BIG, only_run

FIRST = ("train", "name=first", "train.steps=100")


def steps_of(folder):
    return folder.config()["train"]["steps"]


def test_a_finished_run_trains_longer_and_is_still_the_run_of_its_command(project, here, capsys):
    main([*FIRST])
    folder = only_run(project)
    assert main(["resume", folder.name, "train.steps=200"]) == EXIT_FINISHED
    assert here.started == 2 and steps_of(folder) == 200
    assert "Finished: 200 steps" in capsys.readouterr().out
    main(["status", folder.name])
    assert "all steps are done" in capsys.readouterr().out

    assert main([*FIRST]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert here.started == 2 and f"{folder.name} is finished: all steps are done." in shown
    assert f"`slurmddp resume {folder.name} train.steps=...` trains this one further." in shown

    assert main(["train", "name=first", "train.steps=200"]) == EXIT_FINISHED
    assert here.started == 3 and len(list((project / "runs").iterdir())) == 2
    assert main(["train", "name=first", "train.steps=100", "seed=1"]) == EXIT_FINISHED
    assert here.started == 4, "another run"


@pytest.mark.parametrize(
    ("settings", "change", "code", "words"),
    [
        ([], "train.steps=100", EXIT_CONFIG, "=100 does not extend {run}, whose train.steps is 100"),
        ([], "train.steps=9", EXIT_CONFIG, "Give more than 100. `slurmddp rerun {run} train.steps=9` is"),
        ([], "train.max_time=2h", EXIT_RUN_STATE, "`slurmddp resume {run} train.steps=...` with a greater"),
        ([], "time_limit=2h", EXIT_RUN_STATE, "has finished"),
        (["train.max_time=2h"], "train.steps=200 train.max_time=1h", EXIT_CONFIG, "train.max_time is 2h"),
        ([], "train.steps=long", EXIT_CONFIG, "train.steps"),
        (["program._target_=mine.work"], "train.steps=200", EXIT_RUN_STATE, "has finished"),
        (["program.script=mine.py"], "train.steps=200", EXIT_RUN_STATE, "{run} program.resume_args='...'`"),
    ],
)  # fmt: skip
def test_a_finished_run_without_more_to_do_says_how_it_gets_some(
    project, here, capsys, settings, change, code, words
):
    (project / "mine.py").write_text("def work(distributon, config, folder):\n    pass\n")
    main([*FIRST, *settings])
    folder = only_run(project)
    before = folder.config_file.read_bytes()
    assert main(["resume", folder.name, *change.split()]) == code
    assert words.format(run=folder.name) in capsys.readouterr().err
    assert here.started == 1 and folder.config_file.read_bytes() == before


def test_a_run_that_its_time_has_ended_needs_more_time(project, here, capsys, monkeypatch):
    monkeypatch.setattr(here, "records", lambda self: [{"step": 40, "loss": 2.0}])
    main([*FIRST, "train.max_time=1h"])
    folder = only_run(project)
    assert main(["resume", folder.name, "train.steps=200"]) == EXIT_RUN_STATE
    assert (
        f"`slurmddp resume {folder.name} train.max_time=...` with a greater value" in capsys.readouterr().err
    )
    assert main(["resume", folder.name, "train.max_time=2h"]) == EXIT_FINISHED
    assert main(["resume", folder.name, "train.max_time=null", "train.steps=200"]) == EXIT_FINISHED
    assert here.started == 3
    assert main(["resume", folder.name, "train.max_time=9h"]) == EXIT_CONFIG
    assert "train.max_time=9h does not extend" in capsys.readouterr().err


def test_an_extended_run_that_stops_is_cut_off_by_no_earlier_command(project, here, capsys):
    main([*FIRST])
    folder = only_run(project)
    here.ends = staticmethod(lambda: EXIT_STOPPED)
    assert main(["resume", folder.name, "train.steps=200"]) == EXIT_STOPPED
    capsys.readouterr()
    assert main([*FIRST]) == EXIT_RUN_STATE
    shown = capsys.readouterr().err
    assert (
        "was extended: train.steps is 200 in the run, and 100 in this command. Nothing was started" in shown
    )
    assert f"`slurmddp resume {folder.name}` continues it" in shown and steps_of(folder) == 200

    here.ends = staticmethod(lambda: 0)
    assert main(["resume", folder.name, "train.steps=150"]) == EXIT_CONFIG
    assert main(["resume", folder.name, "train.steps=200"]) == EXIT_FINISHED, "the same command resumes"
    assert here.started == 3


def test_a_finished_script_starts_again_with_an_argument_that_may_extend_it(project, here):
    (project / "mine.py").touch()
    main([*FIRST, "program.script=mine.py"])
    folder = only_run(project)
    assert main(["resume", folder.name, "program.resume_args=--epochs 20"]) == EXIT_FINISHED
    assert here.started == 2 and folder.config()["program"]["resume_args"] == ["--epochs", "20"]


def test_a_finished_run_trains_longer_on_its_cluster(project, cluster, capsys):
    main(["train", *BIG])
    folder = only_run(project)
    start(folder, job_id="1")
    end(folder, "finished", job_id="1")
    cluster.set_state("1", "COMPLETED")
    assert main(["resume", folder.name, "train.steps=800", "nodes=1"]) == EXIT_FINISHED
    assert len(cluster.submissions) == 2 and steps_of(folder) == 800
    capsys.readouterr()
    assert main(["train", *BIG]) == EXIT_FINISHED
    assert "is queued already" in capsys.readouterr().out and len(cluster.submissions) == 2


def test_the_finished_runs_of_a_sweep_train_longer(project, here, capsys):
    main(["train", "-m", "name=first", "train.steps=100", "seed=1,2"])
    (file,) = (project / "runs").glob("*.sweep")
    assert main(["resume", file.stem, "train.steps=200"]) == EXIT_FINISHED
    assert here.started == 4
    assert main(["train", "-m", "name=first", "train.steps=100", "seed=1,2"]) == EXIT_FINISHED
    assert here.started == 4
