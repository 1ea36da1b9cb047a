"""States in memory: the writer publishes them after any end of the rank, and new ranks resume from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import checkpoint_folders, verify
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state import staging
from slurmddp.checkpoint.state.staging import NoMemory, Snapshot, StagingBuffers
from slurmddp.errors import CheckpointError
from support import TESTS
from support.distributed import memory_jobs
from support.distributed.checkpoint_files import steps_in
from support.distributed.ranks import CONTEXT, place_environments, run_ranks
from support.distributed.trainer_runs import assert_same

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]
PROGRAM = TESTS / "support/distributed/memory_agent.py"
MIXED = {
    "half": torch.randn(5, 3, dtype=torch.bfloat16),
    "turned": torch.randn(4, 6).t(),
    "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "flags": torch.tensor([True, False, True]),
    "one": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
    "step": 7,
    "pair": (1, [2.5, None]),
}


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


# The copy itself.


@pytest.fixture
def snapshots() -> Iterator[StagingBuffers]:
    made = StagingBuffers()
    yield made
    made.close()


def test_a_copy_holds_the_very_bytes_of_a_checkpoint(tmp_path: Path, snapshots: StagingBuffers) -> None:
    meta = {"seed": 3}
    assert snapshots.copy(Snapshot(tmp_path, 7, 1, MIXED, meta)) == 0
    held = snapshots.newest(tmp_path)
    assert held is not None
    written = checkpoint.write(tmp_path, 7, MIXED, meta=meta)
    with shared_buffer.mapped(*held) as parts:
        assert bytes(parts.tensors) == (written / "state.safetensors").read_bytes()
        assert bytes(parts.tree) == (written / "state.json").read_bytes()
        again = staging.read_state(7, parts)
    assert_same(again.state, checkpoint.read(written).state)
    assert again.meta == meta
    assert snapshots.newest(tmp_path / "other") is None


def test_copies_alternate_and_never_overwrite_a_state_that_is_being_written(
    tmp_path: Path, snapshots: StagingBuffers
) -> None:
    def take(step: int) -> int | None:
        return snapshots.copy(Snapshot(tmp_path, step, step, {"w": torch.full((9,), step)}, {}))

    assert [take(1), take(2), take(3)] == [0, 1, 0]
    snapshots.set_writing(0, True)
    assert [take(4), take(5)] == [1, 1], "3 is being written: it is whole while the others are copied"
    snapshots.set_writing(1, True)
    assert not snapshots.has_free()
    assert take(6) is None
    snapshots.set_writing(0, False)
    assert (snapshots.has_free(), take(6)) == (True, 0)
    snapshots.set_writing(1, False)
    snapshots.discard_after((5, 5))
    held = snapshots.newest(tmp_path)
    assert held is not None and held[1].step == 5


def test_a_state_that_grows_gets_more_memory(tmp_path: Path, snapshots: StagingBuffers) -> None:
    for step, size in enumerate((10, 3_000_000, 20, 4_000_000)):
        state = {"w": torch.full((size,), step, dtype=torch.float32)}
        snapshots.copy(Snapshot(tmp_path, step, 0, state, {}))
        held = snapshots.newest(tmp_path)
        assert held is not None
        with shared_buffer.mapped(*held) as parts:
            assert_same(staging.read_state(step, parts).state, state)


def test_a_refused_allocation_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared_buffer, "reserve", refuse)
    made = StagingBuffers()
    with pytest.raises(NoMemory, match=r"No memory for a copy of .* \(Cannot allocate memory\)"):
        made.copy(Snapshot(tmp_path, 1, 1, {"w": torch.ones(9)}, {}))
    made.close()


def test_a_state_that_can_not_be_stored_leaves_the_copy_before(
    tmp_path: Path, snapshots: StagingBuffers
) -> None:
    snapshots.copy(Snapshot(tmp_path, 1, 1, {"w": torch.ones(9)}, {}))
    for state, meta in (({"w": {1}}, {}), ({"w": 1}, {"x": float("nan")})):
        with pytest.raises(CheckpointError):
            snapshots.copy(Snapshot(tmp_path, 2, 2, state, meta))
    held = snapshots.newest(tmp_path)
    assert held is not None and held[1].step == 1
