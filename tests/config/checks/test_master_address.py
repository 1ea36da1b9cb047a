"""A malformed address of rank 0's node is refused before anything is queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.config.resume_changes import job_of_run
from slurmddp.errors import EXIT_CONFIG, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from support.runs.projects import make_project
from support.slurm.slurm_jobs import FakePrograms

VARIABLE = "SLURMDDP_MASTER_ADDR"
MALFORMED = "1720.30.23.101"
OF_CLUSTER = f"+cluster.env.{VARIABLE}"
ON_CLUSTER = ["+cluster=small", "nodes=2"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: FakePrograms) -> Path:
    folder = make_project(tmp_path / "p")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("variable", "settings", "place"),
    [
        (MALFORMED, ON_CLUSTER, "the environment"),
        ("", [*ON_CLUSTER, f"{OF_CLUSTER}={MALFORMED}"], "cluster.env"),
        ("10.0.0.7", [*ON_CLUSTER, f"{OF_CLUSTER}={MALFORMED}"], "cluster.env"),
        (MALFORMED, [*ON_CLUSTER, f"{OF_CLUSTER}=10.0.0.7"], ""),
        ("login1", ON_CLUSTER, ""),
        ("10.0.0.7", ON_CLUSTER, ""),
        (MALFORMED, [*ON_CLUSTER, "launcher=local", "ranks_per_node=1"], ""),
        (MALFORMED, [], ""),
    ],
)
def test_the_address_that_the_ranks_would_get_is_checked(
    variable: str,
    settings: list[str],
    place: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    code = main(["train", "--dry-run", *settings])
    shown = capsys.readouterr().err
    if not place:
        assert code == 0, shown
        return

    assert code == EXIT_CONFIG
    assert f"{VARIABLE} of {place}, '{MALFORMED}', is not an IPv4 address." in shown


def test_a_resume_refuses_it_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "10.0.0.7")
    assert main(["train", *ON_CLUSTER]) == 0
    (run,) = [RunFolder(path.parent) for path in (project / "runs").glob("*/job.json")]
    monkeypatch.setenv(VARIABLE, MALFORMED)
    with pytest.raises(ConfigError, match="is not an IPv4 address"):
        job_of_run(run, [])
