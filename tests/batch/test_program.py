"""The batch step as one file: any Python from 3.8 on runs it, with the standard library alone."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurmddp.batch.attempt import BatchSettings
from slurmddp.runs.folder.freeze import MODULES, batch_program
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.script import settings
from support import ROOT
from support.slurm.slurm_jobs import make_job

PACKAGE = ROOT
SOURCES = {name: PACKAGE.joinpath(*name.split(".")).with_suffix(".py") for name in MODULES}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, also inside functions."""
    found: set[str] = set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found |= {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_batch_step_is_python_3_8(name: str) -> None:
    assert ast.parse(SOURCES[name].read_text(), feature_version=(3, 8)).body


def test_the_zip_holds_each_module_that_the_batch_step_imports() -> None:
    ours = {one for path in SOURCES.values() for one in imported(path) if one.startswith("slurmddp.")}
    files = {one for one in ours if PACKAGE.joinpath(*one.split(".")).with_suffix(".py").exists()}
    assert files == set(MODULES) - {"slurmddp.batch.__main__"}


Done = subprocess.CompletedProcess[str]

LAZY = {"yaml"}
"""Imported by functions that the batch step never calls."""


def test_all_else_is_the_standard_library() -> None:
    others = {one.split(".")[0] for path in SOURCES.values() for one in imported(path)} - {"slurmddp"}
    assert others - LAZY <= sys.stdlib_module_names


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.batch_file.write_bytes(batch_program())
    folder.job_file.write_text(json.dumps(settings(make_job(project_dir=tmp_path))))
    return folder


def run_it(folder: RunFolder, python: str, *arguments: str, **environ: str) -> Done:
    environ = {"PATH": os.environ["PATH"], "SLURMDDP_RUN_DIR": str(folder.path), **environ}
    command = [python, "-IS", str(folder.batch_file), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)


def pythons() -> list[str]:
    """Return this Python, and the others of this machine that start."""
    found = filter(None, (shutil.which(f"python{version}") for version in ("3.8", "3.9", "3.12")))
    others = [one for one in found if not subprocess.run([one, "-c", ""], capture_output=True).returncode]
    return [sys.executable, *others]


@pytest.mark.parametrize("python", pythons())
def test_a_python_runs_a_whole_attempt(folder: RunFolder, python: str) -> None:
    job = {"SLURM_JOB_ID": "41", "PATH": "/nowhere"}
    begun = run_it(folder, python, "begin", **job)
    assert (begun.returncode, begun.stderr) == (0, "")
    assert "export SLURMDDP_ATTEMPT=0\n" in begun.stdout
    for number in range(2):
        (folder.log_dir(0) / f"exit-node-{number}").write_text("0\n")
    ended = run_it(folder, python, "end", "0", "", SLURMDDP_ATTEMPT="0", **job)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [event["event"] for event in folder.events()] == ["started", "ended"]


def test_an_older_python_says_so(folder: RunFolder) -> None:
    with zipfile.ZipFile(folder.batch_file) as archive:
        start = archive.read("__main__.py").decode()
    probe = f"import sys; sys.version_info = (3, 6)\n{start}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.8 or later" in done.stderr
    check = start.partition("import os")[0]
    assert "version_info" in check and ast.parse(check, feature_version=(3, 4)).body


def test_the_same_modules_give_the_same_bytes() -> None:
    assert batch_program() == batch_program.__wrapped__()


def test_a_job_tells_the_batch_step_all_that_it_reads() -> None:
    found = settings(make_job(grace_s=7, sbatch={"exclude": "n[1-2]"}))
    assert set(found) == set(BatchSettings._fields)
    assert BatchSettings(**json.loads(json.dumps(found))).exclude == "n[1-2]"
