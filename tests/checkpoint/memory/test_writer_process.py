"""Priority and urgency of the writer process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import copy_hashed
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.checkpoint.memory.writer_process import Answer, Request
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.layout import RunFolder
from support.fixtures import MakeService
from support.runs.checkpoint_services import Rank, fill, request, wait_for, written


def test_only_a_background_write_has_a_lower_priority(tmp_path: Path, make_service: MakeService) -> None:
    def perform(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        answer(written(asked["step"], nice))

    service = make_service(perform)
    rank = Rank(service)
    rank.add_buffer(0, 1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for background, expected in ((True, max(own, 5)), (False, own)):
        rank.channel.send(request(tmp_path, 0, 1, background=background))
        wait_for(service)
        assert rank.answer()["written_s"] == expected


def test_a_buffer_that_holds_another_state_is_not_written(tmp_path: Path) -> None:
    buffer, answers = shared_buffer.MappedFile(shared_buffer.create()), list[Any]()
    fill(buffer.descriptor, 1, root=tmp_path)
    writer_process.perform(buffer, request(tmp_path, 0, 2), answers.append)
    buffer.close()
    assert "does not contain the state of step 2" in answers[0]["error"][1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("background", "requested", "is_urgent"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_write_is_urgent_if_training_waits_for_it(
    tmp_path: Path,
    make_service: MakeService,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    requested: bool,
    is_urgent: bool,
) -> None:
    def copy(*words: Any, is_urgent: Callable[[], bool]) -> FileRecord:
        (tmp_path / "is_urgent").write_text(str(is_urgent()))
        return copy_hashed(*words, is_urgent=is_urgent)

    monkeypatch.setattr(writer_process, "copy_hashed", copy)
    service = make_service(writer_process.perform)
    rank = Rank(service)
    descriptor = rank.add_buffer(0, 1)
    shared_buffer.set_urgent(descriptor)
    shared_buffer.set_writing(descriptor, True)  # clears the urgency of the write before
    if requested:
        shared_buffer.set_urgent(descriptor)
    rank.channel.send(request(tmp_path, 0, 1, background=background))
    wait_for(service)
    assert rank.answer()["error"] is None
    assert (tmp_path / "is_urgent").read_text() == str(is_urgent)


def test_a_write_becomes_urgent_when_the_requester_has_ended(tmp_path: Path) -> None:
    own, theirs = WriterChannel.pair()
    asked, gone = threading.Event(), threading.Event()
    seen: list[bool] = []

    def perform(held: shared_buffer.MappedFile, request: Request, answer: Answer) -> None:
        seen.append(shared_buffer.is_urgent(held.descriptor))
        asked.set()
        gone.wait(120.0)
        while not shared_buffer.is_urgent(held.descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(shared_buffer.is_urgent(held.descriptor))

    deadline = time.monotonic() + 120.0
    thread = threading.Thread(target=writer_process.serve, args=(theirs, perform))
    thread.start()
    descriptor = shared_buffer.create()
    own.send({"kind": "memory", "slot": 0}, [descriptor])
    own.send(request(tmp_path, 0, 1, background=True))
    assert asked.wait(120.0)
    time.sleep(2 * writer_process._POLL_S)
    assert not shared_buffer.is_urgent(descriptor)
    own.close()
    gone.set()
    thread.join(120.0)
    theirs.close()
    os.close(descriptor)
    assert seen == [False, True]


@pytest.mark.parametrize("error", [None, CheckpointError("full")])
def test_a_write_that_ends_after_a_later_attempt_has_begun_adds_no_event(
    tmp_path: Path, error: CheckpointError | None
) -> None:
    folder = RunFolder(tmp_path)
    asked = {"step": 3, "since": time.monotonic(), "stall_s": 0.0, "background": True}
    asked |= {"run_dir": str(tmp_path), "attempt": 0}
    writer_process.conclude(asked, error)
    assert len(folder.events()) == 1
    folder.log_dir(1).mkdir(parents=True)
    writer_process.conclude(asked, error)
    assert len(folder.events()) == 1
