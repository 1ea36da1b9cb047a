"""SBATCH_* variables fill in options that the configuration leaves open, and stand in the header."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.config.resume_changes import job_of_run
from slurmddp.errors import EXIT_CONFIG
from slurmddp.runs.folder.layout import RunFolder
from support.runs.projects import make_project
from support.slurm.slurm_jobs import FakePrograms, options_in

SMALL = ["+cluster=small", "nodes=2"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: FakePrograms) -> Path:
    folder = make_project(tmp_path / "p")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return folder


def header(capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[list[str], str]:
    capsys.readouterr()
    assert main(["train", "--dry-run", *SMALL, *settings]) == 0
    shown = capsys.readouterr()
    return options_in(shown.out), shown.err


@pytest.mark.parametrize("submitter", ["sbatch", "submitit"])
def test_they_stand_in_the_header(
    submitter: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj 1")
    monkeypatch.setenv("SBATCH_WCKEY", "k")
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1:30:00")
    lines, notes = header(capsys, f"submitter={submitter}")
    assert any(line in lines for line in ('--account="proj 1"', "--account='proj 1'")), lines
    assert {"--wckey=k", "--exclusive"} <= set(lines), lines
    assert "--time=01:30:00" in lines or "--time=90" in lines
    assert "ignored" not in notes


@pytest.mark.parametrize(
    ("settings", "account"), [(["account=mine"], "mine"), (["cluster.account=ours"], "ours")]
)
def test_the_configuration_wins_and_it_is_said(
    settings: list[str],
    account: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "theirs")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    lines, notes = header(capsys, *settings)
    assert f"--account={account}" in lines and "--account=theirs" not in lines
    assert f"SBATCH_ACCOUNT=theirs is ignored: the configuration has account={account}." in notes
    assert "SBATCH_EXPORT is ignored" in notes


def test_a_variable_of_srun_that_no_job_gets_is_named_with_the_setting_that_takes_its_place(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_HINT", "nomultithread")
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    _, notes = header(capsys, "+cluster.srun.cpu-bind=cores")
    assert "SLURM_HINT=nomultithread is ignored" in notes and "SLURM_CPU_BIND" not in notes
    assert "+cluster.srun.hint=nomultithread" in notes
    _, notes = header(capsys, "+cluster.srun.hint=nomultithread", "+cluster.srun.cpu-bind=cores")
    assert "SLURM_" not in notes


def test_inside_a_job_they_may_be_those_of_that_job(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "outer")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    lines, notes = header(capsys)
    assert not [line for line in lines if "account" in line] and "ignored" not in notes


def test_a_submission_sends_them_in_the_script_and_says_what_it_ignores(
    project: Path,
    programs: FakePrograms,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBATCH_QOS", "high")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-3")
    assert main(["train", *SMALL, "name=x"]) == 0
    assert "SBATCH_ARRAY_INX is ignored" in capsys.readouterr().err
    assert "SBATCH_" not in programs.read("sbatch.env")
    script = Path(programs.read("sbatch.argv").splitlines()[-2])
    assert "#SBATCH --qos=high\n" in script.read_text()
    run = RunFolder(script.parent)
    monkeypatch.setenv("SBATCH_QOS", "low")
    monkeypatch.setenv("SBATCH_ACCOUNT", "later")
    again = job_of_run(run)
    assert (again.cluster.qos, again.cluster.account) == ("high", "later")
    assert job_of_run(run, ["cluster=big"]).cluster.qos == "low"


def test_a_resume_says_what_it_ignores(
    project: Path,
    programs: FakePrograms,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *SMALL, "name=x", "account=mine"]) == 0
    programs.write("jobs/1", "CANCELLED||None|gone")
    (run,) = (project / "runs").iterdir()
    monkeypatch.setenv("SBATCH_ACCOUNT", "theirs")
    capsys.readouterr()
    assert main(["resume", str(run)]) == 0
    assert "SBATCH_ACCOUNT=theirs is ignored: the configuration has account=mine." in capsys.readouterr().err
    assert programs.read("sbatch.calls").count("\n") == 2


@pytest.mark.parametrize("limit", ["soon", "UNLIMITED"])
def test_a_time_that_is_none_is_named(
    limit: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", limit)
    assert main(["train", "--dry-run", *SMALL]) == EXIT_CONFIG
    assert f"SBATCH_TIMELIMIT is '{limit}'" in capsys.readouterr().err
    header(capsys, "time_limit=5")
