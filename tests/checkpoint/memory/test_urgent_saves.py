"""A rank that waits for its saves says so in the memory that is being written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import slurmddp
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.checkpoint.state.safetensors_stream import encoded_size
from slurmddp.checkpoint.state.staging import Snapshots
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.environments.names import CHANNEL_VARIABLE
from slurmddp.errors import CheckpointError
from slurmddp.training.checkpointing.async_writer import AsyncWriter
from support.distributed.checkpoint_files import steps_in


class Agent:
    """Writes nothing, but says that it has, once somebody waits for it."""

    def __init__(self, line: Channel) -> None:
        self._line = line
        self._slots: dict[int, int] = {}
        self._asked: dict[int, int] = {}

    def answer(self) -> int:
        """Return the step of the first write that was answered."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            self._hear()
            for slot, step in self._asked.items():
                if shared_buffer.is_awaited(self._slots[slot]):
                    del self._asked[slot]
                    shared_buffer.set_busy(self._slots[slot], False)
                    self._line.send({"kind": "written", "step": step, "written_s": 0.0, "error": None})
                    return step
        self._line.close()  # The rank hears that, and waits no longer.
        raise AssertionError(f"{self._asked} asked for, and nobody waits")

    def _hear(self) -> None:
        while (received := self._line.receive(0.01)) is not None:
            message, descriptors = received
            if message["kind"] == "memory":
                self._slots[message["slot"]] = descriptors[0]
            else:
                self._asked[message["slot"]] = message["step"]


@pytest.fixture
def both() -> Iterator[tuple[AsyncWriter, Agent]]:
    own, ranks = Channel.pair()
    saves = AsyncWriter({CHANNEL_VARIABLE: str(ranks.fileno())})
    yield saves, Agent(own)
    saves.close()
    own.close()
    ranks.close()


def write(saves: AsyncWriter, root: Path, step: int) -> None:
    state = {"weight": torch.full((1000,), float(step))}
    saves.write(root, step, 0, state, {}, keep_last=3, wait=False, began=time.monotonic())


def test_a_write_beside_the_training_is_made_to_hurry_when_the_training_waits_for_its_end(
    both: tuple[AsyncWriter, Agent], tmp_path: Path
) -> None:
    saves, agent = both
    write(saves, tmp_path, 1)
    assert not any(shared_buffer.is_awaited(one) for one in saves._snapshots.descriptors)
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(agent.answer)
        saves.finish()
        assert answered.result() == 1


def test_a_write_is_made_to_hurry_when_the_next_copy_waits_for_its_memory(
    both: tuple[AsyncWriter, Agent], tmp_path: Path
) -> None:
    saves, agent = both
    for step in (1, 2):
        write(saves, tmp_path, step)
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(agent.answer)
        write(saves, tmp_path, 3)
        assert answered.result() == 1


def test_what_ranks_before_this_one_had_written_is_made_to_hurry_too(tmp_path: Path) -> None:
    own, ranks = Channel.pair()
    before = shared_buffer.create()
    with shared_buffer.reserve(before, shared_buffer.PAGE_BYTES):
        shared_buffer.set_busy(before, True)
    saves = AsyncWriter({CHANNEL_VARIABLE: str(ranks.fileno()), shared_buffer.MEMORY_VARIABLE: str(before)})
    own.send({"kind": "written", "step": 1, "written_s": 0.0, "error": None})
    write(saves, tmp_path, 1)
    assert not shared_buffer.is_awaited(before)
    saves.finish()
    assert shared_buffer.is_awaited(before)
    saves.close()
    own.close()
    ranks.close()
    os.close(before)


def test_a_writer_takes_nothing_of_the_standard_library_from_beside_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurmddp").symlink_to(Path(slurmddp.__file__).parent)
    monkeypatch.setattr(slurmddp, "__file__", str(tmp_path / "slurmddp" / "__init__.py"))
    (tmp_path / "dataclasses.py").write_text("raise RuntimeError('for a Python that had none of its own')")
    (tmp_path / "xxhash.py").write_text("raise RuntimeError('for another Python')")
    line, writer = writer_process.start()
    line.send({"kind": "end"})
    assert writer.wait(60) == 0
    line.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), OSError(24, "Too many files")]
)
def test_a_copy_that_fails_is_told_and_training_goes_on(
    both: tuple[AsyncWriter, Agent],
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Snapshots, "take", fail)
    for step in (1, 2):
        both[0].keep(tmp_path, step, 0, {"weight": torch.ones(3)}, {})
    assert caplog.messages == [f"No more states are kept in memory: {error}"]


def test_a_writer_that_has_ended_between_two_saves_is_replaced_by_another_one(tmp_path: Path) -> None:
    saves = AsyncWriter({})
    for step in (1, 2):
        write(saves, tmp_path, step)
        saves.finish()
        writer = saves._writer
        assert writer is not None
        writer.kill()
        writer.wait(60)
    saves.close()
    assert steps_in(tmp_path) == [2, 1]


def test_a_writer_that_ends_while_it_writes_is_an_error_of_the_next_save_and_of_no_other(
    tmp_path: Path,
) -> None:
    saves = AsyncWriter({})
    write(saves, tmp_path, 1)
    saves.finish()
    writer = saves._writer
    assert writer is not None
    writer.send_signal(signal.SIGSTOP)
    write(saves, tmp_path, 2)
    writer.kill()
    with pytest.raises(CheckpointError, match="wrote the checkpoint of step 2 has ended"):
        saves.finish()
    write(saves, tmp_path, 3)
    saves.finish()
    saves.close()
    assert steps_in(tmp_path) == [3, 1]
    assert writer.returncode == -signal.SIGKILL


def test_memory_taken_in_advance_has_room_for_what_is_told_beside_the_tensors(
    both: tuple[AsyncWriter, Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(descriptor: int, size: int) -> None:
        raise OSError(12, "Not taken in advance")

    saves, _ = both
    state = {"weight": torch.zeros((2 << 20) - shared_buffer.PAGE_BYTES, dtype=torch.uint8)}
    size = encoded_size(flatten(state).tensors)
    assert size == 2 << 20
    saves.prepare(size)
    saves._snapshots._join()
    monkeypatch.setattr(shared_buffer, "reserve", reserve)
    saves.write(tmp_path, 1, 0, state, {}, keep_last=3, wait=False, began=time.monotonic())
    assert saves.busy
