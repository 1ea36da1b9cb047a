"""States in memory: the writer publishes them after any end of the rank, and new ranks resume from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import checkpoint_folders, verify
from support import TESTS
from support.distributed import memory_jobs
from support.distributed.checkpoint_files import steps_in
from support.distributed.ranks import CONTEXT, place_environments, run_ranks
from support.distributed.trainer_runs import assert_same

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]
PROGRAM = TESTS / "support/distributed/memory_agent.py"


# With an agent.


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of several worker groups of two ranks on two nodes, killed in between."""
    folder = tmp_path_factory.mktemp("generations")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)],
        env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False, timeout=400
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = torch.load(folder / "found.pt")
    return loaded


def test_an_interrupted_copy_leaves_the_state_before(found: dict[str, Any]) -> None:
    assert found["held"] == [[None, 5]] * 2, "4 was being overwritten"


def test_a_rank_killed_right_after_the_copy_has_saved(found: dict[str, Any]) -> None:
    assert found["published"] == ["step-0000000005"]


@pytest.mark.parametrize(
    ("name", "begun", "source"),
    [("memory", 5, "memory"), ("node 0 is new", 5, "memory"), ("both", 5, "memory"), ("disk", 5, "disk")],
)
def test_training_resumes_bit_for_bit_from_memory_and_from_disk(
    found: dict[str, Any], name: str, begun: int, source: str
) -> None:
    assert [(one["begun"], one["from"]) for one in found[name]] == [(begun, source)] * 2
    for one, undisturbed in zip(found[name], found["undisturbed"], strict=True):
        assert_same(one["result"], undisturbed["result"])


def test_a_state_of_another_training_is_ignored(found: dict[str, Any]) -> None:
    assert [(one["begun"], one["from"]) for one in found["another root"]] == [(0, None)] * 2


# Without one.


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
    [(100 << 20, 2, ""), (5 << 20, 1, "one copy is held in place of two"), (1 << 20, 0, "training waits")],
)
def test_with_little_memory_there_are_fewer_copies_and_the_same_checkpoints(
    tmp_path: Path, available: int, slots: int, words: str
) -> None:
    (done,) = run_ranks(memory_jobs.saves_with_little_memory, 1, str(tmp_path), available)
    assert done["slots"] == slots
    assert steps_in(tmp_path) == [3, 2, 1]
    assert_same(
        dict(checkpoint.read(tmp_path / "step-0000000003").state["objects"]["model"]), done["weights"]
    )
    assert done["said"].count("\n") == bool(words) and words in done["said"]
