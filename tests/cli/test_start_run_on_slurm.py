"""`slurmddp train` on a cluster: one submission per run, with a summary; a refused one leaves no files."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_SLURM, SlurmError
from slurmddp.runs import index
from slurmddp.slurm.limits.partitions import Partition
from support.runs.train_runs import BIG, only_run


def test_a_submission_says_what_it_is_called_and_how_to_follow_it(project, cluster, capsys):
    assert main(["train", *BIG]) == 0
    folder, shown = only_run(project), capsys.readouterr().out
    assert folder.name.startswith("first-")
    assert f"run     {folder.name}  (24 ranks on 3 nodes of big)" in shown
    assert "tip     run `git init` in the project: then each run keeps a copy of its code" in shown
    assert "job     1\n" in shown and f"slurmddp logs -f {folder.name}" in shown
    assert f"slurmddp status {folder.name}" in shown
    assert [submission.script for submission in cluster.submissions] == [folder.script_file.read_text()]
    assert folder.events()[-1]["event"] == "submitted" and folder.events()[-1]["job_id"] == "1"
    assert yaml.safe_load(folder.config_file.read_text())["nodes"] == 3
    assert index.find("first").path == folder.path


def test_a_submission_of_one_rank_says_so(project, cluster, capsys):
    assert main(["train", *BIG, "nodes=1", "gpus_per_node=1"]) == 0
    assert "(1 rank on 1 node of big)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "is_shown"),
    [
        (["program.script=mine.py", "time_limit=01:00:00"], True),
        (["program.script=mine.py", "time_limit=01:00:00", "program.checkpoints=out/*.pt"], False),
        (["program.script=mine.py", "time_limit=01:00:00", "policy.requeue=false"], False),
        (["time_limit=01:00:00"], False),
    ],
)
def test_a_submission_says_when_the_progress_of_a_script_cannot_be_seen(
    project, cluster, capsys, given, is_shown
):
    (project / "mine.py").write_text("")
    assert main(["train", *BIG, *given]) == 0
    shown = capsys.readouterr().out
    assert ("program.checkpoints=PATH" in shown) == is_shown
    assert ("after 4 time limits without" in shown) == is_shown


def test_a_run_whose_saves_are_known_needs_no_name_of_its_files(project, cluster, capsys):
    (project / "mine.py").write_text("")
    command = ["train", *BIG, "program.script=mine.py", "time_limit=01:00:00"]
    assert main(command) == 0
    latest = only_run(project).checkpoints_dir / "latest"
    latest.parent.mkdir()
    latest.write_text("step-0000000004")
    cluster.set_state("1", "TIMEOUT")
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "job     2\n" in shown and "program.checkpoints" not in shown


def test_a_submission_with_spares_tells_of_them(project, cluster, capsys):
    assert main(["train", *BIG, "spare_nodes=2"]) == 0
    assert "(24 ranks on 3 nodes and 2 spares of big)" in capsys.readouterr().out
    assert "#SBATCH --nodes=5\n" in cluster.submissions[0].script
    cluster.site = {"gpu": Partition(name="gpu", max_nodes=4)}
    assert main(["train", *BIG, "spare_nodes=2", "name=other"]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert "nodes=3 with spare_nodes=2: partition 'gpu' gives a job at most 4 (MaxNodes)" in error
    assert "Use 4 nodes or fewer in all" in error


def test_what_would_never_start_is_refused_before_anything_is_written(project, cluster, capsys):
    cluster.site = {"gpu": Partition(name="gpu", max_nodes=2)}
    assert main(["train", *BIG]) == EXIT_CONFIG
    assert "nodes=3: partition 'gpu' gives a job at most 2" in capsys.readouterr().err
    assert not (project / "runs").exists() and not cluster.submissions


def test_a_refused_submission_leaves_nothing(project, cluster, capsys):
    cluster.refusal = "Invalid account"
    assert main(["train", *BIG]) == EXIT_SLURM
    assert "Invalid account" in capsys.readouterr().err
    assert not (project / "runs").exists()


def unanswered() -> SlurmError:
    error = SlurmError("sbatch gave no answer.")
    error.may_be_queued = True
    return error


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("error", [unanswered(), KeyboardInterrupt(), OSError(5, "no answer")])
def test_a_submission_that_may_have_worked_is_kept_and_told_of(
    project, cluster, monkeypatch, capsys, error, queued
):
    really = cluster.submit

    def submit(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(cluster, "submit", submit)
    assert main(["train", *BIG]) != 0
    run = only_run(project)
    assert run.script_file.exists()
    monkeypatch.chdir(project.parent)
    assert main(["status", run.name]) == 0
    assert "unknown" in (shown := capsys.readouterr().out) and "sbatch did not answer" in shown
    monkeypatch.chdir(project)
    monkeypatch.setattr(cluster, "submit", really)
    if queued:
        cluster.submit(run.script_file, token="t")
    cluster.silence = "it is asleep"
    assert main(["train", *BIG]) == EXIT_SLURM
    cluster.silence = ""
    assert main(["train", *BIG]) == 0
    assert ("SLURM already has job 1 of" in capsys.readouterr().out) is queued
    assert len(cluster.submissions) == 1
    assert main(["train", *BIG]) == 0
    assert "is queued already: job 1" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "the terminal is closed")])
@pytest.mark.parametrize("points", [(), ("-m", "seed=1,2")])
def test_a_job_that_slurm_has_keeps_its_run_whatever_happens_next(
    project, cluster, monkeypatch, capsys, points, error
):
    def failed(event: object) -> None:
        raise error

    with monkeypatch.context() as during:
        during.setattr("slurmddp.cli.start_view._print_submission", failed)
        assert main(["train", *BIG, *points]) != 0

    monkeypatch.chdir(project.parent)
    runs = index.all_runs()
    job_ids = {run.events()[-1]["job_id"] for run in runs}
    assert job_ids == ({"1_0", "1_1"} if points else {"1"})
    monkeypatch.chdir(project)
    assert main(["train", *BIG, *points]) == 0
    assert capsys.readouterr().out.count("is queued already") == len(runs)
    assert len(cluster.submissions) == 1


@pytest.mark.parametrize("points", [(), ("-m", "seed=1,2")])
def test_a_job_whose_run_folder_was_removed_gets_a_new_folder(project, cluster, capsys, points):
    assert main(["train", *BIG, *points]) == 0
    for run in index.all_runs():
        shutil.rmtree(run.path)
    assert main(["train", *BIG, *points]) == 0
    job_ids = [run.events()[-1]["job_id"] for run in index.all_runs()]
    assert sorted(job_ids) == (["1_0", "1_1"] if points else ["1"])
    assert len(cluster.submissions) == 1


def test_a_command_that_is_interrupted_before_sbatch_leaves_nothing(project, cluster, monkeypatch):
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slurmddp.launchers.submit.queued_jobs.settle_each", interrupted)
    assert main(["train", *BIG]) == EXIT_INTERRUPTED
    assert not (project / "runs").exists() and not cluster.submissions


def test_without_slurm_a_job_is_refused_before_anything_is_written(project, capsys):
    assert main(["train", *BIG]) == EXIT_SLURM
    assert "no sbatch" in capsys.readouterr().err and not (project / "runs").exists()
