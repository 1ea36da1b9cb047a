"""The writing rank: urgent writes, writers that end, copies that fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import slurmddp
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.checkpoint.memory.writer_process import Answer, Request
from slurmddp.checkpoint.state.safetensors_stream import encoded_size
from slurmddp.checkpoint.state.staging import Snapshot, StagingBuffers
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.environments.names import CHANNEL_VARIABLE
from slurmddp.errors import CheckpointError
from slurmddp.training.checkpointing.async_writer import AsyncWriter, Keep
from support.distributed.checkpoint_files import steps_in
from support.fixtures import MakeService
from support.runs.checkpoint_services import wait_for, written


def answer_when_urgent(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
    """Stand in for a write: end it once it is urgent, or fail after two minutes."""
    until = time.monotonic() + 120
    while not shared_buffer.is_urgent(held.descriptor):
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.01)
    answer(written(asked["step"]))


@pytest.fixture
def agent(make_service: MakeService) -> CheckpointService:
    return make_service(answer_when_urgent)


@pytest.fixture
def saves(agent: CheckpointService) -> Iterator[AsyncWriter]:
    made = AsyncWriter({CHANNEL_VARIABLE: str(agent.channel_for(0))})
    yield made
    made.close()


def write(saves: AsyncWriter, root: Path, step: int) -> None:
    state = {"weight": torch.full((1000,), float(step))}
    saves.write(Snapshot(root, step, 0, state, {}), Keep(3, None), wait=False, began=time.monotonic())


def test_a_background_write_becomes_urgent_when_training_waits_for_it(
    saves: AsyncWriter, agent: CheckpointService, tmp_path: Path
) -> None:
    write(saves, tmp_path, 1)
    agent.handle()
    assert not any(shared_buffer.is_urgent(one) for one in saves._buffers.descriptors)
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(wait_for, agent)
        saves.finish()
        served.result()


def test_a_write_becomes_urgent_when_the_next_copy_waits_for_its_buffer(
    saves: AsyncWriter, agent: CheckpointService, tmp_path: Path
) -> None:
    durable: list[float] = []
    saves.on_durable = durable.append
    for step in (1, 2):
        write(saves, tmp_path, step)
    agent.handle()
    assert not any(shared_buffer.is_urgent(one) for one in saves._buffers.descriptors)
    is_saved = threading.Event()

    def serve() -> None:
        while not is_saved.wait(0.01):
            agent.handle()

    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(serve)
        try:
            write(saves, tmp_path, 3)
            assert len(durable) >= 1, "step 1 has given its buffer to step 3"
            saves.finish()
        finally:
            is_saved.set()
        served.result()
    assert len(durable) == 3


def test_writes_of_earlier_ranks_become_urgent_too(tmp_path: Path) -> None:
    own, ranks = WriterChannel.pair()
    before = shared_buffer.create()
    with shared_buffer.reserve(before, shared_buffer.PAGE_BYTES):
        shared_buffer.set_writing(before, True)
    saves = AsyncWriter({CHANNEL_VARIABLE: str(ranks.fileno()), shared_buffer.MEMORY_VARIABLE: str(before)})
    own.send(written(1))
    write(saves, tmp_path, 1)
    assert not shared_buffer.is_urgent(before)
    saves.finish()
    assert shared_buffer.is_urgent(before)
    saves.close()
    own.close()
    ranks.close()
    os.close(before)


def test_a_writer_imports_no_module_from_the_working_directory_or_the_folder_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurmddp").symlink_to(Path(slurmddp.__file__).parent)
    monkeypatch.setattr(slurmddp, "__file__", str(tmp_path / "slurmddp" / "__init__.py"))
    (tmp_path / "dataclasses.py").write_text("raise RuntimeError('for an older Python')")
    (tmp_path / "xxhash.py").write_text("raise RuntimeError('for another Python')")
    channel, writer = writer_process.start()
    channel.send({"kind": "end"})
    assert writer.wait(240) == 0
    channel.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), OSError(24, "Too many files")]
)
def test_a_failed_copy_is_logged_once_and_raises_nothing(
    saves: AsyncWriter,
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(StagingBuffers, "copy", fail)
    for step in (1, 2):
        with saves.optional():
            saves.copy_to_memory(Snapshot(tmp_path, step, 0, {"weight": torch.ones(3)}, {}))
    assert caplog.messages == [f"This rank no longer copies its state into memory, only to disk: {error}"]


def test_a_writer_that_ends_is_replaced_and_fails_only_the_save_that_it_was_writing(tmp_path: Path) -> None:
    saves = AsyncWriter({})
    writers = []
    for step in (1, 2):
        write(saves, tmp_path, step)
        saves.finish()
        assert saves._writer is not None
        writers.append(saves._writer)
        if step == 1:
            writers[0].kill()
            writers[0].wait(240)
    writers[1].send_signal(signal.SIGSTOP)
    write(saves, tmp_path, 3)
    writers[1].kill()
    with pytest.raises(
        CheckpointError, match="writer process ended before the checkpoint of step 3 was complete"
    ):
        saves.finish()
    write(saves, tmp_path, 4)
    saves.finish()
    saves.close()
    assert steps_in(tmp_path) == [4, 2, 1]
    assert writers[1].returncode == -signal.SIGKILL


def test_prepared_memory_has_space_for_the_tree_and_the_facts_of_a_state(
    saves: AsyncWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(descriptor: int, size: int) -> None:
        raise OSError(12, "Not allocated in advance")

    state = {"weight": torch.zeros((2 << 20) - shared_buffer.PAGE_BYTES, dtype=torch.uint8)}
    size = encoded_size(flatten(state).tensors)
    assert size == 2 << 20
    saves.prepare(size)
    saves._buffers._join()
    monkeypatch.setattr(shared_buffer, "reserve", reserve)
    saves.write(Snapshot(tmp_path, 1, 0, state, {}), Keep(3, None), wait=False, began=time.monotonic())
    assert saves.is_writing
