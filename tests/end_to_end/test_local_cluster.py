"""A cluster job tried on this machine: the same agents, pretended nodes, gloo instead of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub

pytestmark = pytest.mark.distributed


def test_two_nodes_with_two_ranks_are_pretended_here(tmp_path: Path) -> None:
    size = ["+cluster=a100x8", "nodes=2", "gpus_per_node=2", "launcher=local"]
    small = ["model=gpt_tiny", "train.steps=6", "train.eval_batches=1", "train.sample_chars=5"]
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp", "train", *size, *small, "name=tried"],
        cwd=tmp_path,
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").glob("tried-*")
    logs = run / "logs" / "attempt-0"
    assert {file.name for file in logs.glob("node-*.log")} == {"node-0.log", "node-1.log"}
    assert sorted(file.name for file in logs.glob("rank-*.log")) == [f"rank-{rank}.log" for rank in range(4)]
    assert "rank 3 of 4: gloo on cpu" in (logs / "rank-3.log").read_text()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 6
