"""A function as a job of a real SLURM: its result comes back to the caller."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import slurmddp
from slurmddp.sandbox import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

MODULE = """
import os

def place(word):
    return word, os.environ["WORLD_SIZE"], os.environ["SLURM_JOB_NUM_NODES"]
"""


def test_a_function_runs_on_two_nodes_and_its_result_comes_back(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job_work.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        run = slurmddp.submit("job_work.place", "here", cluster="sandbox", nodes=2, ranks_per_node=1)
        assert run.status().active
        assert run.result(120) == ("here", "2", "2")
    finally:
        sys.modules.pop("job_work", None)
