"""Whose job it is, by the token in its comment and by its script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.slurm.job_script import is_of_unread_array, may_be_of, script_of


@pytest.mark.parametrize(
    ("run", "script", "is_ours"),
    [
        ("gpt-1", "/elsewhere/job.sbatch", True),
        ("gpt-2", "/runs/gpt 1/job.sbatch", False),
        ("", "/runs/gpt 1/job.sbatch resubmitted", True),
        ("", "/moved/gpt 1/submitit/.submission_file_0.sh", True),
        ("", "/runs/gpt-11/job.sbatch", False),
        ("", "/runs/.gpt.1/job.sbatch", False),
        ("", "(null)", False),
        ("", "", True),
    ],
)
def test_the_token_decides_and_then_the_path_of_the_script(run: str, script: str, is_ours: bool) -> None:
    assert may_be_of({"gpt 1", "gpt-1"}, run, script) == is_ours


def take_place(file: Path) -> None:
    """Put a FIFO in the place of a file."""
    file.unlink()
    os.mkfifo(file)


def test_the_script_of_an_element_lies_in_the_folder_that_its_array_names(tmp_path: Path) -> None:
    script = f"{tmp_path}/.gpt.1/job.sbatch"
    assert script_of("7_1", script) == script, "another person's array"
    (tmp_path / ".gpt.1").mkdir()
    (tmp_path / ".gpt.1/elements").write_text("gpt-0\nit's\u2028 1\n")
    assert script_of("7_0", script) == f"{tmp_path}/gpt-0/job.sbatch"
    assert script_of("7_1", script) == f"{tmp_path}/it's\u2028 1/job.sbatch"
    assert script_of("7_2", script) == script_of("7", script) == script_of("1", script) == script
    assert script_of("7_[0-1]", script) == script
    assert script_of("7_1", "") == "" and script_of("7_1", "(null)") == "(null)"
    (tmp_path / ".gpt.1/elements").write_text("gpt-5\n")
    assert script_of("7_0", script) == f"{tmp_path}/gpt-5/job.sbatch", "a new array in the place of the old"


def cut(file: Path) -> None:
    file.write_text("gpt-0\n")


def empty(file: Path) -> None:
    file.write_text("")


@pytest.mark.parametrize("spoil", [Path.unlink, cut, empty, take_place])
def test_an_element_of_an_array_that_does_not_say_its_runs_may_be_of_each_run_beside_it(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    array = tmp_path / ".gpt.1"
    array.mkdir()
    (array / "elements").write_text("gpt-0\ngpt-1\n")
    assert not is_of_unread_array("7_1", script_of("7_1", f"{array}/job.sbatch"), tmp_path / "gpt-0")
    spoil(array / "elements")
    script = script_of("7_1", f"{array}/job.sbatch")
    (tmp_path / "link").symlink_to(tmp_path)
    for job_id, run, is_ours in [
        ("7_1", tmp_path / "gpt-1", True),
        ("7_1", tmp_path / "link/gpt-1", True),
        ("7_1", tmp_path / "other/gpt-1", False),
        ("7", tmp_path / "gpt-1", False),
    ]:
        assert is_of_unread_array(job_id, script, run) == is_ours
