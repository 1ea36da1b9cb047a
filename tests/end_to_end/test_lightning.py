"""Lightning's Fabric and Trainer start in local runs, on one node and on two emulated ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub
from support.distributed.lightning_programs import FOUR, places, settings, write_programs

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("program", ["fabric", "trainer"])
def test_lightning_finds_its_ranks(tmp_path: Path, program: str, nodes: int) -> None:
    write_programs(tmp_path)
    command = [sys.executable, "-m", "slurmddp", "train", "launcher=local", *settings(program, nodes)]
    environment = {**scrub(os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert places(run) == (FOUR if nodes == 2 else [[0, 0, 0, 2], [1, 1, 0, 2]])
