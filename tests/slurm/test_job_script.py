"""Whose job it is, by the token in its comment and by its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.slurm.job_script import may_be_of, script_of


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


def test_the_script_of_an_element_lies_in_the_folder_to_which_its_link_leads(tmp_path: Path) -> None:
    (tmp_path / ".gpt.1").mkdir()
    (tmp_path / ".gpt.1/3").symlink_to("../gpt-1")
    script = f"{tmp_path}/.gpt.1/job.sbatch"
    assert script_of("7_3", script) == f"{tmp_path}/gpt-1/job.sbatch"
    assert script_of("7_4", script) == script_of("7", script) == script_of("3", script) == script
    assert script_of("7_3", "") == "" and script_of("7_3", "(null)") == "(null)"
