"""Different configurations whose names have equal digits: each start compares the configurations."""

from __future__ import annotations

import json

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.jobs import jobs_of
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError
from slurmddp.runs import sweeps
from slurmddp.runs.folder.create import prepare
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings import identity
from slurmddp.settings.spec import FUNCTION_CALL
from support.runs.cli_runs import end, start
from support.runs.train_runs import BIG, only_run

SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2")


@pytest.fixture
def colliding(monkeypatch):
    """Let all runs of a name have the same digits."""
    monkeypatch.setattr(identity, "RUN_DIGITS", 0)


def a_call(number):
    """Return the settings of `slurmddp.submit("math.sqrt", number, ranks_per_node=1)`."""
    words = [*FUNCTION_CALL.split()[1:], "{run_dir}", "math.sqrt", json.dumps([number])]
    arguments = ",".join(json.dumps(word) for word in words)
    return [f"program.script='-m {words.pop(0)}'", f"program.args=[{arguments.partition(',')[2]}]"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (["seed=2"], "seed is 1 in that run, and 2 in this command"),
        (["seed=2", "--again"], "seed is 1 in that run, and 2 in this command"),
        (["seed=2", "nodes=2"], "nodes is 1 in that run, and 2 in this command; seed is 1 in that run"),
        (["seed=1", "train.steps=9"], "train.steps is 400 in that run, and 9 in this command"),
        (["seed=1", "+model.extra='${oc.env:SECRET}'"], "model.extra is not set in that run"),
        (["-m", "seed=1,2"], "seed is 1 in the first, and 2 in the second"),
        (["-m", "seed=3,3.0"], "Two points of the sweep are the same run"),
        ([*SEARCH, "seed=1,2", "hydra.sweeper.n_jobs=2"], "seed is"),
        ([*SEARCH, "seed=2", "+model.x=1,2"], "is another run whose name ends with the same digits"),
    ],
)
def test_a_run_of_another_configuration_is_never_taken_for_this_one(
    project, here, colliding, capsys, monkeypatch, second, words
):
    monkeypatch.setenv("SECRET", "hunter2-hunter2")
    assert main(["train", "seed=1", "name=first"]) == EXIT_FINISHED
    before = only_run(project).config_file.read_bytes()
    assert main(["train", "seed=1", "name=first", "train.log_every=7"]) == EXIT_FINISHED, "the same run"
    capsys.readouterr()

    assert main(["train", "name=first", *second]) == EXIT_CONFIG

    shown = capsys.readouterr()
    assert words in shown.err and "hunter2" not in shown.err
    assert here.started == 1 and only_run(project).config_file.read_bytes() == before


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_unfinished_run_keeps_its_settings_and_its_job(project, cluster, colliding, capsys, is_stopped):
    main(["train", *BIG, "seed=1"])
    folder = only_run(project)
    if is_stopped:
        start(folder, job_id="1")
        end(folder, "stopped", job_id="1")
        cluster.set_state("1", "COMPLETED")
    before = folder.config_file.read_bytes()
    assert main(["train", *BIG, "seed=2"]) == EXIT_CONFIG
    assert "seed is 1 in that run, and 2 in this command" in capsys.readouterr().err
    assert folder.config_file.read_bytes() == before and len(cluster.submissions) == 1


def test_a_run_that_was_resumed_with_another_size_is_still_the_run_of_its_command(project, cluster, capsys):
    main(["train", *BIG])
    folder = only_run(project)
    start(folder, job_id="1")
    end(folder, "stopped", job_id="1")
    cluster.set_state("1", "COMPLETED")
    assert main(["resume", folder.name, "nodes=1"]) == EXIT_FINISHED
    capsys.readouterr()
    assert main(["train", *BIG]) == EXIT_FINISHED
    assert "queued already" in capsys.readouterr().out and len(cluster.submissions) == 2


def test_calls_whose_names_collide_are_refused_together(project, here, colliding):
    with pytest.raises(ConfigError, match=r"digits at its end collide: program\.args is .*10391.*81396"):
        slurmddp.map_array("math.sqrt", [10391, 81396], ranks_per_node=1)
    assert here.started == 0 and not (project / "runs").exists()


def test_a_run_of_an_earlier_version_is_found_and_another_call_with_its_eight_digits_is_a_run_of_its_own(
    project, here
):
    """SHA-256 gives the calls of these two integers the same first eight digits."""
    settings = ["name=sqrt", "ranks_per_node=1", "runs_dir=all"]
    first, other = jobs_of([*a_call(number), *settings] for number in (15600, 58949))
    assert first.run_name[:-4] == other.run_name[:-4] and first.run_name != other.run_name

    prepare(first, None).path.rename(first.run_dir.with_name(first.run_name[:-4]))

    again, other_again = jobs_of([*a_call(number), *settings] for number in (15600, 58949))
    assert again.run_name == first.run_name[:-4] and RunFolder(again.run_dir).config_file.is_file()
    assert other_again.run_name == other.run_name
    (alone,) = jobs_of([[*a_call(15600), *settings]])
    assert alone.run_name == again.run_name


@pytest.mark.parametrize(
    "second", [["-m", "seed=3,4"], [*SEARCH, "seed=3,4"], [*SEARCH, "seed=1,2", "train.steps=9"]]
)
@pytest.mark.parametrize("first", [["-m", "seed=1,2"], [*SEARCH, "seed=1,2"]])
def test_a_sweep_or_a_search_takes_no_other_one_for_itself(project, here, monkeypatch, capsys, first, second):
    monkeypatch.setattr(sweeps, "name_of", lambda name, parts: f"{name}-sweep-0a1b2c3d")
    assert main(["train", "name=first", *first]) == EXIT_FINISHED
    (file,) = (project / "runs").glob("*.sweep")
    before, started = file.read_bytes(), here.started
    assert main(["train", "name=first", *first]) == EXIT_FINISHED, "the same sweep"
    assert here.started == started
    assert main(["train", "name=first", *second]) == EXIT_CONFIG
    assert "belongs to another sweep, whose name has the same hash" in capsys.readouterr().err
    assert file.read_bytes() == before and here.started == started
