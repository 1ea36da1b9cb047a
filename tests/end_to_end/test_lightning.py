"""Lightning's Fabric and Trainer start in local runs, on one node and on two emulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.distributed.lightning_programs import FOUR, places, settings, write_programs
from support.runs.train_runs import only_run, slurmddp

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("program", ["fabric", "trainer"])
def test_lightning_finds_its_ranks(tmp_path: Path, program: str, nodes: int) -> None:
    write_programs(tmp_path)
    slurmddp(tmp_path, "train", "launcher=local", *settings(program, nodes))
    assert places(only_run(tmp_path).path) == (FOUR if nodes == 2 else [[0, 0, 0, 2], [1, 1, 0, 2]])
