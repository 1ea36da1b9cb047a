"""A step in which the kernel has killed a process for want of memory ends with 1, whatever its agents say.

SLURM with task/cgroup then calls every task of that node `Out Of Memory`, also one that ends with 0 because
another rank has taken the place of the killed one; srun's code is 1, and it stops the tasks of other nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from script_run import SAVE, Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_training_that_outlived_it_has_finished(run: Run) -> None:
    assert run.start('echo 0 >"$logs/exit-node-0"; echo 0 >"$logs/exit-node-1"; exit 1') == 0
    assert run.end == ("finished", "none")


def test_a_stop_after_it_is_a_stop(run: Run) -> None:
    assert run.start(SAVE + 'echo 75 >"$logs/exit-node-0"; echo 75 >"$logs/exit-node-1"; exit 1') == 75
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize("other", ["", 'echo 1 >"$logs/exit-node-1"; '])
def test_it_is_a_failure_where_an_agent_did_not_outlive_it(run: Run, other: str) -> None:
    assert run.start(f'echo 0 >"$logs/exit-node-0"; {other}exit 1') == 1
    assert run.end == ("failed", "none")
