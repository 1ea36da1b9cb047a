"""`slurmddp train` with an existing run, with --again, --cfg and --help."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.errors import EXIT_CONFIG, EXIT_RUN_STATE, EXIT_SLURM
from slurmddp.runs.folder.history import UNANSWERED
from support.runs.cli_runs import end, start
from support.runs.train_runs import BIG, only_run


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["program.checkpoints=out"], "slurmddp's trainer saves in the run folder"),
        (["program.checkpoints=[a]"], "path or glob"),
    ],
)
def test_files_that_no_script_saves_are_refused(project, cluster, capsys, given, words):
    assert main(["train", *BIG, *given]) == 78
    assert words in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_the_same_command_does_not_submit_twice(project, cluster, capsys):
    main(["train", *BIG])
    capsys.readouterr()
    assert main(["train", *BIG]) == 0
    shown = capsys.readouterr().out
    assert "queued already: job 1" in shown and "slurmddp logs -f" in shown
    cluster.set_state("1", "RUNNING")
    assert main(["train", *BIG, "time_limit=3:00:00"]) == 0
    assert "Nothing was started" in capsys.readouterr().out
    cluster.silence = "it is asleep"
    assert main(["train", *BIG]) == EXIT_SLURM
    assert "is not known" in capsys.readouterr().err
    assert len(cluster.submissions) == 1


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("PENDING", EXIT_RUN_STATE, "is queued: job 1.*can't be renamed.*Run `slurmddp cancel first-"),
        ("RUNNING", EXIT_RUN_STATE, "is starting: job 1.*can't be renamed.*Run `slurmddp cancel first-"),
        ("silent", EXIT_SLURM, "is not known.*Nothing was submitted"),
        ("unanswered", EXIT_RUN_STATE, "is queued: job 1.*can't be renamed"),
        ("unanswered and silent", EXIT_SLURM, "Nothing was submitted"),
    ],
)
def test_again_refuses_an_active_run(project, cluster, capsys, state, code, words):
    main(["train", *BIG])
    folder = only_run(project)
    if "unanswered" in state:
        folder.attempts_file.write_text("")
        folder.add_event(UNANSWERED, submitter="sbatch")
    if "silent" in state:
        cluster.silence = "it is asleep"
    cluster.set_state("1", state if state.isupper() else "PENDING")
    capsys.readouterr()
    assert main(["train", *BIG, "--again"]) == code
    shown = capsys.readouterr()
    assert re.search(words, shown.err) and "kept as" not in shown.out
    assert only_run(project).path == folder.path and len(cluster.submissions) == 1


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_run_that_is_still_ending_is_not_started_again(project, cluster, capsys, command):
    main(["train", *BIG])
    folder = only_run(project)
    start(folder, job_id="1")
    cluster.set_state("1", "RUNNING")
    again = ["train", *BIG] if command == "train" else ["resume", folder.name]
    assert main(again) == 0
    folder.stop_file.touch()
    assert main(again) == EXIT_RUN_STATE
    said = capsys.readouterr().err
    assert "was asked to stop and has not ended yet" in said and "Run the command again when" in said
    folder.stop_file.rename(folder.cancelled_file)
    cluster.set_state("1", "COMPLETING")
    folder.add_event("cancelled", job_id="1")
    assert main(again) == EXIT_RUN_STATE
    assert "shows that the run has ended" in capsys.readouterr().err
    assert len(cluster.submissions) == 1


def test_a_run_that_ended_goes_on_in_its_folder(project, cluster):
    main(["train", *BIG])
    folder = only_run(project)
    start(folder, job_id="1")
    end(folder, "stopped", code=75, job_id="1")
    folder.cancelled_file.touch()
    folder.stop_file.touch()
    cluster.set_state("1", "COMPLETED")
    assert main(["train", *BIG, "time_limit=01:00:00"]) == 0
    assert only_run(project).path == folder.path and len(cluster.submissions) == 2
    assert "--time=01:00:00" in folder.script_file.read_text()
    assert not folder.cancelled_file.exists() and folder.log_dir(0).is_dir()
    assert not folder.stop_file.exists()


def test_again_puts_the_finished_run_aside(project, here, capsys):
    main(["train"])
    name = only_run(project).name
    (only_run(project).path / "mark").touch()
    for number in (1, 2):
        assert main(["train", "--again"]) == 0
        assert f"{name}.old-{number}" in capsys.readouterr().out
    assert (project / "runs" / f"{name}.old-1" / "mark").exists()
    assert {path.name for path in (project / "runs").iterdir()} == {name, f"{name}.old-1", f"{name}.old-2"}
    assert here.started == 3


@pytest.mark.parametrize("in_git", [True, False])
def test_a_finished_or_active_run_names_the_code_that_has_changed_since(
    project, here, cluster, capsys, monkeypatch, in_git
):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    if in_git:
        subprocess.run(["git", "init", "-q", "."], check=True)
    (project / "pkg").mkdir()
    for name in ("my_model.py", "pkg/data.py", "notes.txt"):
        (project / name).write_text("v = 1\n")
    if in_git:
        subprocess.run(["git", "add", "notes.txt"], check=True)

    def shown(*words: str) -> str:
        assert main(["train", *words]) == 0
        return capsys.readouterr().out

    shown(), shown(*BIG)
    assert "has changed" not in shown() and "has changed" not in shown(*BIG)
    (project / "losses.csv").write_text("written by the run")
    (project / "runs" / "other.py").write_text("of another run")
    assert "--again starts it once more from step 0" in shown()

    (project / "my_model.py").write_text("v = 2\n")
    assert "my_model.py has changed since this run. --again runs the new code." in shown()
    assert "queued already" in (active := shown(*BIG)) and "my_model.py has changed since this run." in active

    (project / "pkg" / "data.py").unlink()
    (project / "pkg" / "new.py").touch()
    (project / "notes.txt").write_text("v = 2\n")
    names = (
        "my_model.py, notes.txt, pkg/data.py and 1 more" if in_git else "my_model.py, pkg/data.py, pkg/new.py"
    )
    assert f"{names} have changed since this run. --again runs the new code." in shown()
    shown("--again")
    assert "changed" not in shown() and here.started == 2


def test_cfg_prints_yaml_that_gives_the_run_again(project, capsys):
    assert main(["train", "--cfg", *BIG]) == 0
    job = build_job(compose(BIG, project), project_dir=project, overrides=BIG)
    assert yaml.safe_load(capsys.readouterr().out) == job.program.config
    assert not (project / "runs").exists()


def test_help_names_every_setting(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "time_limit",
        "train.batch_size",
        "policy.max_restarts",
        "--dry-run",
        "--again",
        "75  stopped",
    ):
        assert word in shown


def test_a_damaged_record_is_named_and_can_be_put_aside(here, project, capsys):
    assert main(["train", "name=first"]) == 0
    (project / "runs" / only_run(project).name / "attempts.jsonl").write_text("no record\n")
    assert main(["train", "name=first"]) == EXIT_CONFIG
    assert "attempts.jsonl, line 1 is not JSON" in capsys.readouterr().err
    assert main(["train", "name=first", "--again"]) == 0
