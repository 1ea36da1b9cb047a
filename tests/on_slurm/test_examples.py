"""The SLURM example on a real SLURM of two nodes: it ends with the bits of two local ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from slurmddp.environments.scrub import scrub
from slurmddp.sandbox import Sandbox
from support.distributed.doc_programs import newest_weights
from support.runs.examples import example
from support.slurm.train_project import Command, Run

pytestmark = pytest.mark.slurm


def test_t1_t8_the_slurm_example_ends_with_the_weights_of_the_local_one(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    slurm, local = (example(name, tmp_path) for name in ("04_slurm", "02_local"))
    command = Command(slurm, sandbox.environment())
    command("run", "+cluster=sandbox", "nodes=2", "-n", "1", "name=spirals", "train.py", "--epochs", "8")
    run = Run(next((slurm / "runs").iterdir()), command)
    environment = {**scrub(os.environ), "OMP_NUM_THREADS": "1"}
    alone = [sys.executable, "train.py", "--epochs", "8"]
    subprocess.run(alone, cwd=local, env=environment, check=True, timeout=200)
    run.wait_finished()
    assert len(run.events("saved")) == 8
    ours, theirs = (load(newest_weights(folder)) for folder in (run.folder, local))
    names = [name for name in theirs if name.startswith("objects/")]
    assert len(names) > 6
    assert all(torch.equal(ours[name], theirs[name]) for name in names)
    assert "of the held-out points" in command("logs", "spirals")
