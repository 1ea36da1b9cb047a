"""Staging buffers: copies of tensors of all layouts, growth, failed allocations."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state.mapped_tensor import MappedTensor
from slurmddp.checkpoint.state.staging import NoMemory, Snapshot, StagingBuffers, read_state
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.errors import CheckpointError
from support.distributed.checkpoint_files import newest_copy, same

LARGE = (300, 400)
TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),  # The complex tensors behind it begin at odd places.
    "small": torch.randn(7, 3),
    "large": torch.randn(LARGE),
    "one number": torch.tensor(4.5),
    "nothing": torch.empty(0, 5),
    "nothing of a column": torch.empty(5, 4)[:, 1:1],
    "column": torch.randn(9, 4)[:, 1],
    "large columns": torch.randn(LARGE).t(),
    "one element of a column": torch.randn(1, 8)[:, 3],
    "part": torch.arange(100)[10:20],
    "spread": torch.tensor([1.0]).expand(12),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "large conjugate": torch.randn(LARGE, dtype=torch.complex64).conj(),
    "complex columns": torch.randn(LARGE, dtype=torch.complex64).t(),
    "last channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "words of 16 bits": torch.randn(11).bfloat16(),
    "truths": torch.tensor([True, False, True]),
    "eight bits": torch.randn(6).to(torch.float8_e4m3fn),
    "trained": torch.nn.Parameter(torch.randn(5)),
    "trained and large": torch.nn.Parameter(torch.randn(LARGE)),
}


@pytest.fixture
def buffers() -> Iterator[StagingBuffers]:
    made = StagingBuffers()
    yield made
    made.close()


def copied(buffers: StagingBuffers, state: dict[str, Any]) -> dict[str, Any]:
    number = buffers.copy(Snapshot(Path("/root"), 3, 0, state, {}))
    assert number is not None
    descriptor = buffers.descriptors[number]
    header = shared_buffer.read_header(descriptor)
    assert header is not None
    with shared_buffer.mapped(descriptor, header) as stored:
        return dict(read_state(3, stored).state)


def test_a_growing_state_is_copied(buffers: StagingBuffers) -> None:
    root, made = Path("/root"), []
    for step in range(8):
        state = {"replay": torch.zeros(10_000_000 + step * 1_000_000)}
        if buffers.copy(Snapshot(root, step, 0, state, {}), wait=False) is not None:
            made.append(step)
        buffers._join()
    assert len(made) >= 3


def test_a_tensor_without_its_storage_is_refused_by_name() -> None:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="at model/weight is a tensor whose storage was freed"):
        flatten({"model": {"weight": tensor}})


def test_a_copy_in_inference_mode_leaves_buffers_that_training_can_use(
    buffers: StagingBuffers,
) -> None:
    state = {"weight": torch.randn(LARGE)}
    with torch.inference_mode():
        copied(buffers, state)
        copied(buffers, state)
    assert torch.equal(copied(buffers, state)["weight"], state["weight"])


@pytest.fixture
def elsewhere_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere_by_default")
def test_a_state_is_read_to_the_cpu_under_any_default_device(buffers: StagingBuffers, tmp_path: Path) -> None:
    for found in (
        copied(buffers, {"weight": TENSORS["part"]}),
        checkpoint.read(
            checkpoint.write(tmp_path, 1, {"weight": TENSORS["part"]}, meta={}, keep_last=3)
        ).state,
    ):
        assert found["weight"].tolist() == list(range(10, 20))


def test_a_failed_allocation_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    advise = shared_buffer._advise

    def refuse_the_third(address: int, size: int, advice: int) -> int:
        asked.append(advice)
        return (
            errno.EFAULT if asked.count(shared_buffer._POPULATE_WRITE) == 3 else advise(address, size, advice)
        )

    asked: list[int] = []
    descriptor = shared_buffer.create()
    shared_buffer.reserve(descriptor, shared_buffer.PAGE_BYTES).close()
    before = os.fstat(descriptor)
    os.pwrite(descriptor, b"kept", 0)
    monkeypatch.setattr(shared_buffer, "_CHUNK_BYTES", 4 * shared_buffer.PAGE_BYTES)
    monkeypatch.setattr(shared_buffer, "_advise", refuse_the_third)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        shared_buffer.reserve(descriptor, 100 * shared_buffer.PAGE_BYTES)
    assert caught.value.errno == errno.ENOMEM
    after = os.fstat(descriptor)
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
    assert os.pread(descriptor, 4, 0) == b"kept"
    os.close(descriptor)


def test_a_copy_holds_the_bytes_of_a_checkpoint(tmp_path: Path, buffers: StagingBuffers) -> None:
    state, meta = {**TENSORS, "step": 7, "pair": (1, [2.5, None])}, {"seed": 3}
    assert buffers.copy(Snapshot(tmp_path, 7, 1, state, meta)) == 0
    found = newest_copy(buffers, tmp_path)
    assert found is not None
    written = checkpoint.write(tmp_path, 7, state, meta=meta, keep_last=3)
    with shared_buffer.mapped(*found) as stored:
        assert bytes(stored.tensors) == (written / "state.safetensors").read_bytes()
        assert bytes(stored.tree) == (written / "state.json").read_bytes()
        again = read_state(7, stored)
    assert same(again.state, state | {name: tensor.detach() for name, tensor in TENSORS.items()})
    assert again.meta == meta
    assert newest_copy(buffers, tmp_path / "other") is None


def test_an_interrupted_copy_leaves_the_state_before(
    tmp_path: Path, buffers: StagingBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for step in (1, 2):
        buffers.copy(Snapshot(tmp_path, step, 0, {"w": torch.ones(9)}, {}))
    monkeypatch.setattr(MappedTensor, "_copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        buffers.copy(Snapshot(tmp_path, 3, 0, {"w": torch.ones(9)}, {}))
    assert [shared_buffer.newest_step([number]) for number in buffers.descriptors] == [None, 2]


def test_copies_alternate_and_never_overwrite_a_state_that_is_being_written(
    tmp_path: Path, buffers: StagingBuffers
) -> None:
    def copy(step: int) -> int | None:
        return buffers.copy(Snapshot(tmp_path, step, step, {"w": torch.full((9,), step)}, {}))

    assert [copy(1), copy(2), copy(3)] == [0, 1, 0]
    buffers.set_writing(0, True)
    assert [copy(4), copy(5)] == [1, 1], "3 is being written: it is whole while the others are copied"
    buffers.set_writing(1, True)
    assert not buffers.has_free()
    assert copy(6) is None
    buffers.set_writing(0, False)
    assert (buffers.has_free(), copy(6)) == (True, 0)
    buffers.set_writing(1, False)
    buffers.set_writing(0, True)
    buffers.discard_after((5, 5))
    assert buffers.is_writing(), "the next copy would change the bytes of a checkpoint while they are written"
    buffers.set_writing(0, False)
    buffers.discard_after((5, 5))
    found = newest_copy(buffers, tmp_path)
    assert found is not None and found[1].step == 5


def test_a_state_that_grows_gets_more_memory(tmp_path: Path, buffers: StagingBuffers) -> None:
    for step, size in enumerate((10, 3_000_000, 20, 4_000_000)):
        state = {"w": torch.full((size,), step, dtype=torch.float32)}
        buffers.copy(Snapshot(tmp_path, step, 0, state, {}))
        found = newest_copy(buffers, tmp_path)
        assert found is not None
        with shared_buffer.mapped(*found) as stored:
            assert same(read_state(step, stored).state, state)


def test_a_refused_allocation_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared_buffer, "reserve", refuse)
    made = StagingBuffers()
    with pytest.raises(
        NoMemory, match=r"memory for a copy of .* could not be allocated \(Cannot allocate memory\)"
    ):
        made.copy(Snapshot(tmp_path, 1, 1, {"w": torch.ones(9)}, {}))
    made.close()


def test_a_state_that_can_not_be_stored_leaves_the_copy_before(
    tmp_path: Path, buffers: StagingBuffers
) -> None:
    buffers.copy(Snapshot(tmp_path, 1, 1, {"w": torch.ones(9)}, {}))
    for state, meta in (({"w": {1}}, {}), ({"w": 1}, {"x": float("nan")})):
        with pytest.raises(CheckpointError):
            buffers.copy(Snapshot(tmp_path, 2, 2, state, meta))
    found = newest_copy(buffers, tmp_path)
    assert found is not None and found[1].step == 1
