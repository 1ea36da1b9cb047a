"""A rank that waits for its saves says so in the memory that is being written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slurmddp.node import memory
from slurmddp.node.channel import CHANNEL_VARIABLE, Channel
from slurmddp.training.saves import Saves


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
                if memory.is_awaited(self._slots[slot]):
                    del self._asked[slot]
                    memory.set_busy(self._slots[slot], False)
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
def both() -> Iterator[tuple[Saves, Agent]]:
    own, ranks = Channel.pair()
    saves = Saves({CHANNEL_VARIABLE: str(ranks.fileno())})
    yield saves, Agent(own)
    saves.close()
    own.close()
    ranks.close()


def write(saves: Saves, root: Path, step: int) -> None:
    state = {"weight": torch.full((1000,), float(step))}
    saves.write(root, step, 0, state, {}, keep_last=3, wait=False, began=time.monotonic())


def test_a_write_beside_the_training_is_made_to_hurry_when_the_training_waits_for_its_end(
    both: tuple[Saves, Agent], tmp_path: Path
) -> None:
    saves, agent = both
    write(saves, tmp_path, 1)
    assert not any(memory.is_awaited(one) for one in saves._snapshots.descriptors)
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(agent.answer)
        saves.finish()
        assert answered.result() == 1


def test_a_write_is_made_to_hurry_when_the_next_copy_waits_for_its_memory(
    both: tuple[Saves, Agent], tmp_path: Path
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
    before = memory.create()
    with memory.reserve(before, memory.PAGE_BYTES):
        memory.set_busy(before, True)
    saves = Saves({CHANNEL_VARIABLE: str(ranks.fileno()), memory.MEMORY_VARIABLE: str(before)})
    own.send({"kind": "written", "step": 1, "written_s": 0.0, "error": None})
    write(saves, tmp_path, 1)
    assert not memory.is_awaited(before)
    saves.finish()
    assert memory.is_awaited(before)
    saves.close()
    own.close()
    ranks.close()
    os.close(before)
