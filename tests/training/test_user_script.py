"""The exit code of a rank that runs a person's script, for each way in which the script ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub
from support.distributed.doc_programs import WITH, WITHOUT, loop_with_a_stop
from support.distributed.ranks import Program, run_programs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

RANK = """
import sys
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.user_script import run_script

sys.exit(run_script(RunFolder("run"), "script.py", []))
"""
COMPUTE = "d.backward(model(torch.ones(1, 1)).sum())"


def run_as_rank(folder: Path, script: str) -> int:
    (folder / "script.py").write_text(script)
    (folder / "rank.py").write_text(RANK)
    environment = {**scrub(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ((code, _),) = run_programs([Program([str(folder / "rank.py")], environment, folder)])
    return code


@pytest.mark.parametrize(
    ("begin", "then"), [(WITH, "break"), (WITHOUT, "break"), (WITHOUT, "sys.exit()"), (WITH, "sys.exit(75)")]
)
def test_a_loop_that_is_left_at_a_stop_has_not_finished(tmp_path: Path, begin: str, then: str) -> None:
    assert run_as_rank(tmp_path, loop_with_a_stop(begin, then)) == 75


def test_a_loop_that_computes_on_after_a_stop_finishes(tmp_path: Path) -> None:
    assert run_as_rank(tmp_path, loop_with_a_stop(WITHOUT, "continue", COMPUTE)) == 0


def test_a_script_without_a_stop_finishes(tmp_path: Path) -> None:
    assert run_as_rank(tmp_path, loop_with_a_stop(WITHOUT, "break", signal_after=0)) == 0


@pytest.mark.parametrize(
    ("begin", "then", "last", "code"),
    [(WITHOUT, "break", "raise ValueError('after the loop')", 1), (WITH, "sys.exit(3)", "pass", 3)],
)
def test_an_error_after_a_stop_is_no_stop(
    tmp_path: Path, begin: str, then: str, last: str, code: int
) -> None:
    assert run_as_rank(tmp_path, loop_with_a_stop(begin, then, last)) == code
