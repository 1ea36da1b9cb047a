"""A finished training that is extended ends with the weights of one that had that length from the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.folder.layout import RunFolder
from support.distributed.trainer_runs import assert_same, curve, final_state
from support.runs.train_runs import slurmddp

pytestmark = pytest.mark.distributed

SETTINGS = (
    "ranks_per_node=1", "model=gpt_tiny", "scheduler=constant", "train.batch_size=2", "train.eval_every=5",
    "train.eval_batches=1", "train.log_every=1", "train.sample_chars=20", "train.best=eval_loss",
)  # fmt: skip


def run_of(project: Path, name: str) -> RunFolder:
    (path,) = (project / "runs").glob(f"{name}-*")
    return RunFolder(path)


def test_an_extended_training_equals_one_of_that_length(tmp_path: Path) -> None:
    slurmddp(tmp_path, "train", "name=whole", "train.steps=10", *SETTINGS)
    slurmddp(tmp_path, "train", "name=parts", "train.steps=5", *SETTINGS)
    extended = slurmddp(tmp_path, "resume", "parts", "train.steps=10")
    assert "Finished: 10 steps" in extended

    whole, parts = run_of(tmp_path, "whole"), run_of(tmp_path, "parts")
    assert_same(final_state(parts), final_state(whole))
    assert curve(parts) == curve(whole)
    assert parts.sample_file.read_text() == whole.sample_file.read_text()
    assert "is finished" in slurmddp(tmp_path, "train", "name=parts", "train.steps=5", *SETTINGS)
