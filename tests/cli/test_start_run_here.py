"""`slurmddp train` on this machine: results, stops and failures as the terminal shows them."""

from __future__ import annotations

import os

import pytest

from slurmddp.cli.main import main
from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.control import jobs
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_STOPPED, RankFailure
from support.runs.train_runs import only_run


def test_a_training_here_shows_its_results(project, here, capsys):
    def finish() -> int:
        folder = only_run(project)
        folder.sample_file.write_text("def f():\n    pass\n")
        folder.report_file.write_text("<html>")
        (folder.checkpoints_dir / "step-0000000400").mkdir(parents=True)
        (folder.checkpoints_dir / "latest").write_text("step-0000000400\n")
        (folder.loggers_dir / "wandb" / "offline-run-1").mkdir(parents=True)
        return 0

    here.ends = staticmethod(finish)
    assert main(["train"]) == 0
    folder, shown = only_run(project), capsys.readouterr().out
    assert f"run     {folder.name}  (2 ranks on this machine)" in shown
    assert "attempt 0 starts on here" in shown and "step 400/400  held-out loss 2.2500" in shown
    assert "Finished: 400 steps, held-out loss 4.500 -> 2.250." in shown
    assert "    def f():\n        pass\n" in shown
    assert f"report      {folder.report_file}" in shown
    assert f"curves      wandb sync {folder.loggers_dir}/wandb/offline-run-*  # " in shown
    assert f"checkpoint  {folder.checkpoints_dir / 'step-0000000400'}" in shown
    assert main(["train"]) == 0
    assert f"{folder.name} is finished" in capsys.readouterr().out and here.started == 1


def test_a_stopped_training_says_how_to_go_on(project, here, capsys):
    here.ends = staticmethod(lambda: EXIT_STOPPED)
    assert main(["train"]) == EXIT_STOPPED
    assert capsys.readouterr().out.endswith("Stopped at step 40; the same command resumes from there.\n")
    here.ends = staticmethod(lambda: 130)
    assert main(["train"]) == 130
    assert "Killed; the same command resumes from the last checkpoint." in capsys.readouterr().out
    assert here.started == 2


@pytest.mark.parametrize(("code", "word"), [(EXIT_STOPPED, "Stopped"), (130, "Killed")])
def test_the_end_of_a_script_tells_which_of_its_files_are_there(project, here, capsys, code, word):
    def last_line(*settings: str) -> str:
        assert main(["train", "program.script=mine.py", *settings]) == code
        return capsys.readouterr().out.splitlines()[-1]

    (project / "mine.py").touch()
    here.ends = staticmethod(lambda: code)
    again = f"{word}. The same command starts the script again; "
    unknown = "slurmddp knows its checkpoints only if program.checkpoints=PATH names them."
    assert last_line("name=a") == again + unknown
    named = ("name=b", "program.checkpoints='{run_dir}/out/*.pt'")
    nothing = "no saved file matches program.checkpoints={run_dir}/out/*.pt."
    assert last_line(*named) == f"{again}{nothing}"
    run = next((project / "runs").glob("b-*"))
    (run / "out").mkdir()
    (run / "out" / "1.pt").touch()
    matching = f". Files match program.checkpoints, but slurmddp can't check them: {run}/out/*.pt"
    assert last_line(*named) == again.removesuffix("; ") + matching


def test_a_failed_training_shows_the_failing_rank(project, here, capsys):
    def fail() -> int:
        raise RankFailure("Rank 1 on here ended with exit code 1.", hint="The log is there.")

    here.ends = staticmethod(fail)
    assert main(["train"]) == EXIT_FAILED
    assert (
        capsys.readouterr().err
        == "slurmddp: error: Rank 1 on here ended with exit code 1. The log is there.\n"
    )


def test_a_run_in_a_shell_of_salloc_uses_its_nodes(project, here, capsys, monkeypatch, tmp_path):
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == 0
    shown = capsys.readouterr().out
    assert "(2 ranks on 1 node of job 7)" in shown
    assert "note    job 7 holds 2 nodes; to use more, set nodes=N." in shown
    assert main(["train", "nodes=3"]) == EXIT_CONFIG
    assert "nodes=3 is more than the 2 nodes of this allocation (job 7)" in capsys.readouterr().err


def test_a_folder_in_the_way_is_not_touched(project, here, capsys):
    job = build_job(compose([], project), project_dir=project)
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "thesis.txt").write_text("mine")
    assert main(["train"]) == EXIT_CONFIG
    assert "is no run folder" in capsys.readouterr().err
    assert [path.name for path in job.run_dir.iterdir()] == ["thesis.txt"] and here.started == 0


def test_gpus_are_counted_without_torch(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert jobs.visible_gpus({}, tmp_path) == 2
    assert jobs.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert jobs.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert jobs.visible_gpus({}, tmp_path / "none") == 0


def test_a_project_outside_of_git_gets_one_tip(project, here, capsys):
    assert main(["train"]) == 0
    tip = "tip     run `git init` in the project: then each run keeps a copy of its code."
    first = capsys.readouterr().out
    assert tip in first.splitlines() and "No snapshot" not in first
    assert main(["train", "seed=2"]) == 0
    later = capsys.readouterr().out
    assert "tip " not in later and "code " not in later and "folder  " in later
