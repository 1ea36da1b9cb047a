"""The run folder of the batch step's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.slurm.batch_run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)
