"""`slurmddp train`: submits once, shows before it sends, trains here, leaves nothing when refused."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmddp.cli import start_run
from slurmddp.cli.main import main
from slurmddp.cli.messages import EXIT_INTERRUPTED
from slurmddp.config.compose import compose
from slurmddp.config.job import build_job
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_RUN_STATE,
    EXIT_SLURM,
    EXIT_STOPPED,
    RankFailure,
    SlurmError,
)
from slurmddp.launchers.local import run as local
from slurmddp.runs import index
from slurmddp.runs.folder.history import UNANSWERED
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm import client
from slurmddp.slurm.partitions import Limits, Partition
from slurmddp.slurm.script import render
from support.runs.projects import make_project
from support.slurm.slurm_in_memory import FakeSlurm
from support.slurm.slurm_jobs import FakePrograms

BIG = ("+cluster=big", "nodes=3", "name=first")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = make_project(tmp_path / "project")
    monkeypatch.chdir(project)
    monkeypatch.setattr(start_run, "gpus_here", lambda environ: 0)
    monkeypatch.setattr(client, "on_path", lambda: False)
    return project


@pytest.fixture
def slurm(project: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(client, "on_path", lambda: True)
    for command in ("resume", "status"):  # A first import here would keep the fake for later tests.
        monkeypatch.setattr(f"slurmddp.cli.commands.{command}.SlurmClient", lambda: fake)
    monkeypatch.setattr(client, "SlurmClient", lambda **options: fake)
    return fake


def only_run(project: Path) -> RunFolder:
    (path,) = (project / "runs").iterdir()
    return RunFolder(path)


def test_a_submission_says_what_it_is_called_and_how_to_follow_it(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *BIG]) == 0
    folder, shown = only_run(project), capsys.readouterr().out
    assert folder.name.startswith("first-")
    assert f"run     {folder.name}  (24 ranks on 3 nodes of big)" in shown
    assert "job     1\n" in shown and f"slurmddp logs -f {folder.name}" in shown
    assert f"slurmddp status {folder.name}" in shown
    assert [submission.script for submission in slurm.submissions] == [folder.script_file.read_text()]
    assert folder.events()[-1]["event"] == "submitted" and folder.events()[-1]["job_id"] == "1"
    assert yaml.safe_load(folder.config_file.read_text())["nodes"] == 3
    assert index.find("first").path == folder.path


def test_a_submission_of_one_rank_says_so(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *BIG, "nodes=1", "gpus_per_node=1"]) == 0
    assert "(1 rank on 1 node of big)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["program.script=mine.py", "time_limit=01:00:00"], True),
        (["program.script=mine.py", "time_limit=01:00:00", "program.checkpoints=out/*.pt"], False),
        (["time_limit=01:00:00"], False),
    ],
)
def test_a_submission_says_when_the_progress_of_a_script_cannot_be_seen(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], given: list[str], told: bool
) -> None:
    (project / "mine.py").write_text("")
    assert main(["train", *BIG, *given]) == 0
    shown = capsys.readouterr().out
    assert ("program.checkpoints=PATH" in shown) == told
    assert ("after 4 time limits without" in shown) == told


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["program.checkpoints=out"], "for a program of your own"),
        (["program.checkpoints=[a]"], "path or glob"),
    ],
)
def test_files_that_no_script_saves_are_refused(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    assert main(["train", *BIG, *given]) == 78
    assert words in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_a_submission_with_spares_tells_of_them(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *BIG, "spare_nodes=2"]) == 0
    assert "(24 ranks on 3 nodes and 2 spares of big)" in capsys.readouterr().out
    assert "#SBATCH --nodes=5\n" in slurm.submissions[0].script
    slurm.site = Limits(partitions={"gpu": Partition(name="gpu", max_nodes=4)})
    assert main(["train", *BIG, "spare_nodes=2", "name=other"]) == EXIT_CONFIG
    told = capsys.readouterr().err
    assert "nodes=3 with spare_nodes=2 is more than partition 'gpu' gives a job (4)" in told
    assert "Use 4 nodes or fewer in all" in told


def test_a_dry_run_prints_the_bytes_that_a_submission_sends(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *BIG]) == 0
    shown = capsys.readouterr()
    assert not (project / "runs").exists() and not slurm.submissions
    job = build_job(compose(BIG, project), project_dir=project, overrides=BIG)
    assert shown.out == render(job)
    assert main(["train", *BIG]) == 0
    assert slurm.submissions[0].script == shown.out
    assert subprocess.run(["bash", "-n"], input=shown.out, text=True).returncode == 0


def test_a_dry_run_prints_what_submitit_sends(
    project: Path, slurm: FakeSlurm, programs: FakePrograms, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*BIG, "submitter=submitit", "account=a b", "+cluster.sbatch.wckey=k", "time_limit=90"]
    assert main(["train", "--dry-run", *asked]) == 0
    shown = capsys.readouterr()
    assert not (project / "runs").exists() and not slurm.submissions
    assert (
        "runs/first-" in shown.err and "job.sbatch, which a dry run with submitter=sbatch prints" in shown.err
    )
    assert main(["train", *asked]) == 0
    assert slurm.submissions[0].script == shown.out
    assert "submitit.core._submit" in shown.out


def test_a_dry_run_shows_submitits_script_where_there_is_no_slurm(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(project))
    assert main(["train", "--dry-run", *BIG, "submitter=submitit"]) == 0
    assert "submitit.core._submit" in capsys.readouterr().out


def test_a_dry_run_repeats_the_lines_that_settings_decide(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *BIG, "+cluster.srun.cpu-bind=cores"]) == 0
    shown = capsys.readouterr()
    told = [line.strip() for line in shown.err.splitlines()[1:]]
    script = [line.strip() for line in shown.out.splitlines()]
    assert [line for line in told if line.startswith("#SBATCH")] == [
        line for line in script if line.startswith("#SBATCH")
    ]
    assert {"export A=1", "module load cuda"} <= set(told) & set(script)
    assert told[-1].startswith("srun --nodes=3 ") and "--cpu-bind=cores" in told[-1]


def test_a_dry_run_says_how_many_nodes_go_on_when_one_is_lost(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = ["train", "--dry-run", *BIG, "nodes=8", "elastic=true"]
    assert main(elastic) == 0
    assert "4 of the other 7 continue: 7 nodes can't share the 1024 samples" in capsys.readouterr().err
    for silent in (["train.global_batch=896"], ["elastic=false"], ["nodes=1"]):
        assert main([*elastic, *silent]) == 0
        assert "note" not in capsys.readouterr().err, silent


def test_a_dry_run_says_whether_this_slurm_would_take_it(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.site = Limits(partitions={"gpu": Partition(name="gpu", max_nodes=2, max_time_min=60)})
    assert main(["train", "--dry-run", *BIG]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n")
    notes = [line for line in shown.err.splitlines() if "note" in line]
    assert len(notes) == 2 and all(
        note.startswith("slurmddp: note: This SLURM would never") for note in notes
    )
    slurm.silence = "it is asleep"
    assert main(["train", "--dry-run", *BIG]) == 0
    assert "does not answer" in capsys.readouterr().err


def test_what_would_never_start_is_refused_before_anything_is_written(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.site = Limits(partitions={"gpu": Partition(name="gpu", max_nodes=2)})
    assert main(["train", *BIG]) == EXIT_CONFIG
    assert "nodes=3 is more than partition 'gpu' gives" in capsys.readouterr().err
    assert not (project / "runs").exists() and not slurm.submissions


def test_a_refused_submission_leaves_nothing(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.refusal = "Invalid account"
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
    project: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    queued: bool,
) -> None:
    really = slurm.submit

    def submit(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(slurm, "submit", submit)
    assert main(["train", *BIG]) != 0
    run = only_run(project)
    assert run.script_file.exists()
    monkeypatch.chdir(project.parent)
    assert main(["status", run.name]) == 0
    assert "unknown" in (shown := capsys.readouterr().out) and "sbatch gave no answer" in shown
    monkeypatch.chdir(project)
    monkeypatch.setattr(slurm, "submit", really)
    if queued:
        slurm.submit(run.script_file, token="t")
    slurm.silence = "it is asleep"
    assert main(["train", *BIG]) == EXIT_SLURM
    slurm.silence = ""
    assert main(["train", *BIG]) == 0
    assert ("SLURM has job 1 of" in capsys.readouterr().out) is queued
    assert len(slurm.submissions) == 1
    assert main(["train", *BIG]) == 0
    assert "is queued already: job 1" in capsys.readouterr().out


def test_a_command_that_is_interrupted_before_sbatch_leaves_nothing(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slurmddp.launchers.submit.sbatch.settle", interrupted)
    assert main(["train", *BIG]) == EXIT_INTERRUPTED
    assert not (project / "runs").exists() and not slurm.submissions


def test_without_slurm_a_job_is_refused_before_anything_is_written(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *BIG]) == EXIT_SLURM
    assert "no sbatch" in capsys.readouterr().err and not (project / "runs").exists()


def test_the_same_command_does_not_submit_twice(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *BIG])
    capsys.readouterr()
    assert main(["train", *BIG]) == 0
    shown = capsys.readouterr().out
    assert "queued already: job 1" in shown and "slurmddp logs -f" in shown
    slurm.set_state("1", "RUNNING")
    assert main(["train", *BIG, "time_limit=3:00:00"]) == 0
    assert "Nothing was started twice" in capsys.readouterr().out
    assert len(slurm.submissions) == 1


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("PENDING", EXIT_RUN_STATE, "is queued: job 1.*can't be put aside.*First `slurmddp cancel first-"),
        ("RUNNING", EXIT_RUN_STATE, "is starting: job 1.*can't be put aside.*First `slurmddp cancel first-"),
        ("silent", EXIT_SLURM, "can't be seen.*nothing was submitted"),
        ("unanswered", EXIT_RUN_STATE, "is queued: job 1.*can't be put aside"),
        ("unanswered and silent", EXIT_SLURM, "Nothing was submitted"),
    ],
)
def test_fresh_refuses_an_active_run(
    project: Path,
    slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: int,
    words: str,
) -> None:
    main(["train", *BIG])
    folder = only_run(project)
    if "unanswered" in state:
        folder.attempts_file.write_text("")
        folder.add_event(UNANSWERED, submitter="sbatch")
    if "silent" in state:
        slurm.silence = "it is asleep"
    slurm.set_state("1", state if state.isupper() else "PENDING")
    capsys.readouterr()
    assert main(["train", *BIG, "--fresh"]) == code
    shown = capsys.readouterr()
    assert re.search(words, shown.err) and "kept as" not in shown.out
    assert only_run(project).path == folder.path and len(slurm.submissions) == 1


def test_a_run_whose_cancelled_job_is_still_ending_is_not_called_submitted(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *BIG])
    folder = only_run(project)
    folder.add_event("started", attempt=0, job_id="1", launcher="slurm", nodes="n1")
    slurm.set_state("1", "COMPLETING")
    folder.cancelled_file.touch()
    folder.add_event("cancelled", job_id="1")
    assert main(["train", *BIG]) == EXIT_RUN_STATE
    assert "Try again in a moment" in capsys.readouterr().err
    assert len(slurm.submissions) == 1


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_run_that_was_asked_to_stop_and_still_runs_is_not_called_resumed(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    main(["train", *BIG])
    folder = only_run(project)
    folder.add_event("started", attempt=0, job_id="1", launcher="slurm", nodes="n1")
    slurm.set_state("1", "RUNNING")
    again = ["train", *BIG] if command == "train" else ["resume", folder.name]
    assert main(again) == 0
    folder.stop_file.touch()
    assert main(again) == EXIT_RUN_STATE
    said = capsys.readouterr().err
    assert "was asked to stop and has not ended yet" in said and "Try again" in said
    assert len(slurm.submissions) == 1 and folder.stop_file.exists()


def test_while_slurm_is_silent_nobody_submits_twice(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *BIG])
    slurm.silence = "it is asleep"
    assert main(["train", *BIG]) == EXIT_SLURM
    assert "can't be seen" in capsys.readouterr().err


def test_a_run_that_ended_goes_on_in_its_folder(project: Path, slurm: FakeSlurm) -> None:
    main(["train", *BIG])
    folder = only_run(project)
    folder.log_dir(0).mkdir(parents=True)
    folder.add_event("started", attempt=0, job_id="1", restart_count=0, nodes="n1", launcher="slurm")
    folder.add_event("ended", attempt=0, job_id="1", exit_code=75, outcome="stopped", next="none")
    folder.cancelled_file.touch()
    folder.stop_file.touch()
    slurm.set_state("1", "COMPLETED")
    assert main(["train", *BIG, "time_limit=01:00:00"]) == 0
    assert only_run(project).path == folder.path and len(slurm.submissions) == 2
    assert "--time=01:00:00" in folder.script_file.read_text()
    assert not folder.cancelled_file.exists() and folder.log_dir(0).is_dir()
    assert not folder.stop_file.exists()


class FakeLocal:
    """Stands for `LocalRun`: writes what ranks would, and ends as it is told to."""

    ends: Callable[[], int] = staticmethod(lambda: 0)
    started = 0

    def __init__(self, job: Any, folder: RunFolder, *, say: Callable[[str], None], lock: Any) -> None:
        self.folder, self.steps = folder, job.program.config["train"]["steps"]

    def start(self) -> None:
        type(self).started += 1
        attempt = self.folder.claim_attempt()
        self.folder.add_event(
            "started", attempt=attempt, job_id="local-1", restart_count=0, nodes="here", launcher="local"
        )

    def wait(self, on_tick: Callable[[], None]) -> int:
        for step, value in ((0, 4.5), (self.steps, 2.25)):
            append_line(
                self.folder.metrics_file, {"step": step, "attempt": 0, "time": 1.0, "eval_loss": value}
            )
        on_tick()
        code = type(self).ends()
        outcome = {0: "finished", 75: "stopped"}.get(code, "failed")
        self.folder.add_event("saved", attempt=0, step=40, seconds=0.1)
        self.folder.add_event(
            "ended", attempt=0, job_id="local-1", exit_code=code, outcome=outcome, next="none"
        )
        return code


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeLocal]:
    fake = type("OneLocal", (FakeLocal,), {"started": 0})
    monkeypatch.setattr(local, "LocalRun", fake)
    return fake


def test_a_training_here_shows_its_results(
    project: Path, here: type[FakeLocal], capsys: pytest.CaptureFixture[str]
) -> None:
    def finish() -> int:
        folder = only_run(project)
        folder.sample_file.write_text("def f():\n    pass\n")
        folder.report_file.write_text("<html>")
        (folder.checkpoints_dir / "step-0000000400").mkdir(parents=True)
        (folder.checkpoints_dir / "latest").write_text("step-0000000400\n")
        return 0

    here.ends = staticmethod(finish)
    assert main(["train"]) == 0
    folder, shown = only_run(project), capsys.readouterr().out
    assert f"run     {folder.name}  (2 ranks on this machine)" in shown
    assert "attempt 0 starts on here" in shown and "step 400/400  held-out loss 2.2500" in shown
    assert "Finished: 400 steps, held-out loss 4.500 -> 2.250." in shown
    assert "    def f():\n        pass\n" in shown
    assert f"report      {folder.report_file}" in shown
    assert f"checkpoint  {folder.checkpoints_dir / 'step-0000000400'}" in shown
    assert main(["train"]) == 0
    assert f"{folder.name} is finished" in capsys.readouterr().out and here.started == 1


def test_fresh_puts_the_finished_run_aside(
    project: Path, here: type[FakeLocal], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train"])
    name = only_run(project).name
    (only_run(project).path / "mark").touch()
    for number in (1, 2):
        assert main(["train", "--fresh"]) == 0
        assert f"{name}.old-{number}" in capsys.readouterr().out
    assert (project / "runs" / f"{name}.old-1" / "mark").exists()
    assert {path.name for path in (project / "runs").iterdir()} == {name, f"{name}.old-1", f"{name}.old-2"}
    assert here.started == 3


def test_a_stopped_training_says_how_to_go_on(
    project: Path, here: type[FakeLocal], capsys: pytest.CaptureFixture[str]
) -> None:
    here.ends = staticmethod(lambda: EXIT_STOPPED)
    assert main(["train"]) == EXIT_STOPPED
    assert capsys.readouterr().out.endswith("Stopped at step 40; the same command resumes from there.\n")
    here.ends = staticmethod(lambda: 130)
    assert main(["train"]) == 130
    assert "Killed; the same command resumes from the last checkpoint." in capsys.readouterr().out
    assert here.started == 2


def test_a_failed_training_shows_the_failing_rank(
    project: Path, here: type[FakeLocal], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise RankFailure("Rank 1 on here ended with exit code 1.", hint="The log is there.")

    here.ends = staticmethod(fail)
    assert main(["train"]) == EXIT_FAILED
    assert (
        capsys.readouterr().err
        == "slurmddp: error: Rank 1 on here ended with exit code 1. The log is there.\n"
    )


def test_a_folder_in_the_way_is_not_touched(
    project: Path, here: type[FakeLocal], capsys: pytest.CaptureFixture[str]
) -> None:
    job = build_job(compose([], project), project_dir=project)
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "thesis.txt").write_text("mine")
    assert main(["train"]) == EXIT_CONFIG
    assert "is no run folder" in capsys.readouterr().err
    assert [path.name for path in job.run_dir.iterdir()] == ["thesis.txt"] and here.started == 0


def test_a_dry_run_here_prints_commands_that_a_shell_can_read(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        "--dry-run",
        *BIG,
        "nodes=2",
        "gpus_per_node=2",
        "launcher=local",
        "cluster.env.B='a b'",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("-m slurmddp.launchers.agent") == 2
    assert "SLURM_STEP_NUM_NODES=2" in shown and "B='a b'" in shown
    assert subprocess.run(["bash", "-n"], input=shown, text=True).returncode == 0
    assert not (project / "runs").exists()


def test_cfg_prints_yaml_that_gives_the_run_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", *BIG]) == 0
    job = build_job(compose(BIG, project), project_dir=project, overrides=BIG)
    assert yaml.safe_load(capsys.readouterr().out) == job.program.config
    assert not (project / "runs").exists()


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert start_run.gpus_here({}, tmp_path) == 2
    assert start_run.gpus_here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert start_run.gpus_here({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert start_run.gpus_here({}, tmp_path / "none") == 0


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "time_limit",
        "train.batch_size",
        "policy.max_restarts",
        "--dry-run",
        "--fresh",
        "75  stopped",
    ):
        assert word in shown


def test_a_damaged_record_is_named_and_can_be_put_aside(
    here: type[FakeLocal], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "name=first"]) == 0
    (project / "runs" / only_run(project).name / "attempts.jsonl").write_text("no record\n")
    assert main(["train", "name=first"]) == EXIT_CONFIG
    assert "attempts.jsonl, line 1 is not JSON" in capsys.readouterr().err
    assert main(["train", "name=first", "--fresh"]) == 0
