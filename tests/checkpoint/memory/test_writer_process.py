"""A writer leaves the processors to the training, until somebody waits for what it writes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.checkpoint.files.durable import FileRecord, copy_hashed
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.checkpoint.memory.service import Keeper
from slurmddp.checkpoint.memory.writer_process import Request, Tell
from support.runs.checkpoint_services import Rank, request, wait_for


def test_a_writer_gives_way_to_the_training_only_while_nobody_waits(
    tmp_path: Path, make_keeper: Callable[..., Keeper]
) -> None:
    def perform(held: shared_buffer.Held, asked: Request, tell: Tell) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        tell({"kind": "written", "step": asked["step"], "written_s": nice, "error": None})

    keeper = make_keeper(perform)
    rank = Rank(keeper)
    rank.lay(0, 1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for background, expected in ((True, max(own, 5)), (False, own)):
        rank.line.send(request(tmp_path, 0, 1, background=background))
        wait_for(keeper)
        assert rank.answer()["written_s"] == expected


@pytest.mark.parametrize(
    ("background", "awaited", "hurry"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_writer_hurries_once_somebody_waits(
    tmp_path: Path,
    make_keeper: Callable[..., Keeper],
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    awaited: bool,
    hurry: bool,
) -> None:
    def copy(*words: Any, hurry: Callable[[], bool]) -> FileRecord:
        (tmp_path / "hurry").write_text(str(hurry()))
        return copy_hashed(*words, hurry=hurry)

    monkeypatch.setattr(writer_process, "copy_hashed", copy)
    keeper = make_keeper(writer_process.perform)
    rank = Rank(keeper)
    descriptor = rank.lay(0, 1)
    shared_buffer.set_awaited(descriptor)
    shared_buffer.set_busy(descriptor, True)  # Who waited for the write before does not count.
    if awaited:
        shared_buffer.set_awaited(descriptor)
    rank.line.send(request(tmp_path, 0, 1, background=background))
    wait_for(keeper)
    assert rank.answer()["error"] is None
    assert (tmp_path / "hurry").read_text() == str(hurry)


def test_a_writer_hurries_once_whoever_started_it_is_gone(tmp_path: Path) -> None:
    own, theirs = Channel.pair()
    asked, gone = threading.Event(), threading.Event()
    seen: list[bool] = []

    def perform(held: shared_buffer.Held, request: Request, tell: Tell) -> None:
        asked.set()
        seen.append(shared_buffer.is_awaited(held.descriptor))
        gone.wait(10.0)
        while not shared_buffer.is_awaited(held.descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(shared_buffer.is_awaited(held.descriptor))

    deadline = time.monotonic() + 10.0
    thread = threading.Thread(target=writer_process.serve, args=(theirs, perform))
    thread.start()
    descriptor = shared_buffer.create()
    own.send({"kind": "memory", "slot": 0}, [descriptor])
    own.send(request(tmp_path, 0, 1, background=True))
    assert asked.wait(10.0)
    time.sleep(2 * writer_process._LOOK_S)
    assert not shared_buffer.is_awaited(descriptor)
    own.close()
    gone.set()
    thread.join(20.0)
    theirs.close()
    os.close(descriptor)
    assert seen == [False, True]


def test_an_agent_that_is_about_to_end_waits_for_its_writes(
    tmp_path: Path, make_keeper: Callable[..., Keeper]
) -> None:
    def perform(held: shared_buffer.Held, asked: Request, tell: Tell) -> None:
        while not shared_buffer.is_awaited(held.descriptor):
            time.sleep(0.01)
        tell({"kind": "written", "step": asked["step"], "written_s": 0.0, "error": None})

    keeper = make_keeper(perform)
    rank = Rank(keeper)
    for slot in (0, 1):
        shared_buffer.set_busy(rank.lay(slot, slot + 1), True)
        rank.line.send(request(tmp_path, slot, slot + 1, background=True))
    assert keeper.finish(30)
