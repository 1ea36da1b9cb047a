"""States in memory: the writer publishes them after any end of the rank, and new ranks resume from them."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import checkpoint_folders, verify
from slurmddp.checkpoint.state import staging
from slurmddp.training.distributon import Distributon
from support.distributed import memory_jobs
from support.distributed.checkpoint_files import steps_in
from support.distributed.rank_jobs import weights
from support.distributed.ranks import CONTEXT, place_environments, run_ranks
from support.distributed.trainer_runs import assert_same

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.mark.parametrize("holders", [[0, 1], [0], [1]])
def test_training_resumes_bit_for_bit_from_the_memory_of_any_node(tmp_path: Path, holders: list[int]) -> None:
    for undisturbed, resumed in run_ranks(memory_jobs.resumed_from_memory, 2, str(tmp_path), holders):
        assert_same(resumed, undisturbed)


def test_saves_without_a_wait_are_durable_at_the_end_and_hold_the_copied_state(tmp_path: Path) -> None:
    results = [
        run_ranks(memory_jobs.train_and_save, 2, str(tmp_path / str(wait)), [2, 4, 5], wait)
        for wait in (False, True)
    ]
    assert_same(results[0], results[1])
    for beside in checkpoint_folders(tmp_path / "False"):
        plain = tmp_path / "True" / beside.name
        assert verify(beside).files == verify(plain).files
        assert (verify(beside).meta, verify(beside).versions) == (verify(plain).meta, verify(plain).versions)
    assert steps_in(tmp_path / "False") == [5, 4, 2]


def test_the_writer_of_a_killed_rank_finishes(tmp_path: Path) -> None:
    (environ,) = place_environments(1)
    rank = CONTEXT.Process(target=be_killed, args=(environ, str(tmp_path)))
    rank.start()
    rank.join(300)
    assert rank.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while not steps_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert verify(tmp_path / "step-0000000003").step == 3


def be_killed(environ: dict[str, str], root: str) -> None:
    os.environ.update(environ)
    memory_jobs.killed_after_the_copy(root, 3)


def test_an_error_of_the_writer_is_raised_on_all_ranks_at_the_next_call(tmp_path: Path) -> None:
    for said in run_ranks(memory_jobs.errors_beside, 2, str(tmp_path)):
        assert said["after"] == "good"
        for name in ("finish", "next"):
            assert said[name].startswith("CheckpointError")
            assert "The checkpoint of step 1 could not be written" in said[name]
    assert steps_in(tmp_path / "good") == [1], "the save that met the error of the one before has not begun"


@pytest.mark.parametrize(
    ("available", "slots", "words"),
    [(100 << 20, 2, ""), (5 << 20, 1, "too little for two copies"), (1 << 20, 0, "training waits")],
)
def test_with_little_memory_there_are_fewer_copies_and_the_same_checkpoints(
    tmp_path: Path, alone: Distributon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    available: int, slots: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(staging, "available_bytes", lambda: available)
    loop = memory_jobs.Loop(alone)
    for step in (1, 2, 3):
        loop.train(step)
        alone.save(step, root=tmp_path, wait=False, **loop.objects)
    assert len(alone._checkpointer.saves._buffers.descriptors) == slots
    alone.finish_saving()
    assert steps_in(tmp_path) == [3, 2, 1]
    saved = checkpoint.read(tmp_path / "step-0000000003").state["objects"]["model"]
    assert_same(dict(saved), weights(loop.model))
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(words) and words in "".join(said)
