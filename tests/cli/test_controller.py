"""`slurmddp controller`: its script is checked and gives the run its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG, EXIT_USAGE


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "control.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "control.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("where", [["-n", "2"], ["+cluster=cpu", "nodes=2"], ["nodes=2"]])
@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ([], EXIT_USAGE, "needs a script"),
        (["-m"], EXIT_USAGE, "needs a script"),
        (["contrl.py"], EXIT_CONFIG, "There is no script .*/contrl.py.*Did you mean control.py"),
        (["-m", "package.contrl"], EXIT_CONFIG, "no module package.contrl.*Did you mean control"),
    ],
)
def test_a_wrong_script_is_refused_before_anything_starts(project, capsys, where, typed, code, message):
    assert main(["controller", *where, *typed]) == code
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (project / "runs").exists()


@pytest.mark.parametrize("typed", [["control.py"], ["-m", "package.control"]])
def test_the_run_is_named_for_the_script(project, capsys, typed):
    assert main(["controller", "+cluster=cpu", "--cfg", *typed, "--epochs", "2"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "control"
