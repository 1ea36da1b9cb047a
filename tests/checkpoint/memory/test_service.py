"""The checkpoint service writes the states of its ranks, after any end of a rank or writer."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from slurmddp.checkpoint.files import retention
from slurmddp.checkpoint.files.manifest import (
    TENSORS_FILE,
    TREE_FILE,
    checkpoint_folders,
    folder_name,
    shard_file,
    verify,
)
from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.checkpoint.memory.writer_process import Answer, Request
from slurmddp.errors import EXIT_USAGE, CheckpointError
from support.distributed.trainer_runs import new_folder
from support.fixtures import MakeService
from support.runs.checkpoint_services import TENSORS, TREE, Rank, fill, request, wait_for, write, written


def test_a_state_is_published_after_its_rank_is_gone(tmp_path: Path, service: CheckpointService) -> None:
    rank = Rank(service)
    os.close(rank.add_buffer(0, 7))
    folder = new_folder(tmp_path / "run")
    rank.channel.send(request(tmp_path, 0, 7, run_dir=str(folder.path), attempt=4, background=True))
    rank.channel.close()
    service.channel_for(0)  # The line of the next start replaces the line before it, not its requests.
    wait_for(service)
    (written,) = checkpoint_folders(tmp_path)
    assert (verify(written).step, verify(written).meta) == (7, {"kind": "test"})
    assert (written / TENSORS_FILE).read_bytes() == TENSORS
    assert (written / TREE_FILE).read_bytes() == TREE
    (event,) = folder.events()
    assert (event["event"], event["step"], event["seconds"], event["attempt"]) == ("saved", 7, 0.25, 4)
    assert event["written_s"] >= 0
    assert service.newest_step() == 7
    assert not shared_buffer.is_writing(service.memory_fds()[0])


def test_the_next_ranks_inherit_the_buffers_and_interrupted_copies_are_ignored(
    service: CheckpointService,
) -> None:
    assert (service.newest_step(), service.memory_fds()) == (None, [])
    rank = Rank(service)
    rank.add_buffer(0, 5)
    rank.add_buffer(1, 9, committed=False)
    service.handle()
    assert service.newest_step() == 5
    fds = shared_buffer.from_environment(
        {shared_buffer.MEMORY_VARIABLE: ",".join(map(str, service.memory_fds()))}
    )
    assert len(fds) == 2
    state, interrupted = (shared_buffer.read_header(number) for number in fds)
    assert state is not None and interrupted is None
    with shared_buffer.mapped(fds[0], state) as stored:
        assert (bytes(stored.tensors), bytes(stored.tree)) == (TENSORS, TREE)


def test_a_buffer_that_a_killed_rank_marked_without_a_request_is_released(
    tmp_path: Path, service: CheckpointService
) -> None:
    rank = Rank(service)
    for slot in (0, 1):
        shared_buffer.set_writing(rank.add_buffer(slot, 5 + slot), True)
    rank.channel.send(request(tmp_path, 1, 6))  # It was killed before it could ask for the other one.
    service.channel_for(1)  # A rank whose own line has nothing to say about it.
    assert [shared_buffer.is_writing(number) for number in service.memory_fds()] == [False, True]
    wait_for(service)
    assert not shared_buffer.is_writing(service.memory_fds()[1])


def test_a_mapped_file_shows_the_next_state_and_grows() -> None:
    descriptor = shared_buffer.create()
    held = shared_buffer.MappedFile(descriptor)
    for step, size in ((1, 5000), (2, 5000), (3, 50_000)):
        tensors = bytes([step]) * size
        state = shared_buffer.StoredState(step, 0, shared_buffer.PAGE_BYTES, size, 2, 2)
        with shared_buffer.reserve(descriptor, state.end) as area:
            area[state.tensors_at : state.end] = tensors + b"[]" + b"{}"
        with held.mapped(state) as parts:
            assert (bytes(parts.tensors), bytes(parts.tree), parts.about) == (tensors, b"[]", {})
    held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_finish_makes_the_writes_urgent_and_they_come_one_by_one(
    tmp_path: Path, make_service: MakeService
) -> None:
    def perform(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
        with (tmp_path / "log").open("a") as log:
            log.write(f"begin {asked['step']}\n")
            log.flush()
            while not shared_buffer.is_urgent(held.descriptor):
                time.sleep(0.01)
            log.write(f"end {asked['step']}\n")
        answer(written(asked["step"]))

    service = make_service(perform)
    rank = Rank(service)
    held = [rank.add_buffer(slot, slot + 1) for slot in (0, 1)]
    for slot in (0, 1):
        shared_buffer.set_writing(held[slot], True)
        rank.channel.send(request(tmp_path, slot, slot + 1, background=True))
    service.handle()
    assert service.is_writing()
    assert service.finish(60)
    assert (tmp_path / "log").read_text().split("\n")[:4] == ["begin 1", "end 1", "begin 2", "end 2"]
    assert [rank.answer()["step"], rank.answer()["step"]] == [1, 2]
    assert not any(shared_buffer.is_writing(descriptor) for descriptor in held)


def test_a_writer_without_a_channel_says_so() -> None:
    with open(os.devnull, "rb") as nothing:
        command = writer_process.command(nothing)  # type: ignore[arg-type]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert "is not a checkpoint channel" in done.stderr


def test_a_killed_writer_is_an_error_for_its_rank(tmp_path: Path, make_service: MakeService) -> None:
    def perform(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # It ends its job's processes, and not what they leave behind.
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    service = make_service(perform)
    rank = write(service, tmp_path, 3)
    error = writer_process.error_of(rank.answer())
    assert type(error).__name__ == "CheckpointError"
    assert "the checkpoint of step 3 was killed by SIGKILL" in str(error)
    assert not shared_buffer.is_writing(service.memory_fds()[0])
    assert service.newest_step() == 3, "the state itself is whole"


def test_a_writer_that_is_killed_within_a_part_ends_the_wait_of_the_publisher(
    tmp_path: Path, make_service: MakeService
) -> None:
    service = make_service(lambda held, asked, answer: os.kill(os.getpid(), signal.SIGKILL))
    rank = write(service, tmp_path, 3, part=2, stamp=7)
    assert writer_process.error_of(rank.answer()) is not None
    with pytest.raises(CheckpointError, match=r"Another node did not write its part.*killed by SIGKILL"):
        Parts(tmp_path, folder_name(3), 7, 4).collect([shard_file(2)], tmp_path)


def test_a_writer_that_exits_is_reported_with_its_exit_code(
    tmp_path: Path, make_service: MakeService
) -> None:
    rank = write(make_service(lambda held, asked, answer: os._exit(3)), tmp_path, 3)
    error = writer_process.error_of(rank.answer())
    assert error is not None
    assert error.message == "The process that wrote the checkpoint of step 3 ended with exit code 3."
    assert "mem_gb" not in error.hint
    assert "node-N.log" in error.hint


def test_a_writer_that_ends_between_writes_is_replaced(tmp_path: Path, service: CheckpointService) -> None:
    rank = write(service, tmp_path, 3)
    assert rank.answer()["error"] is None
    assert service._writer is not None
    pid = service._writer.process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    fill(rank.add_buffer(1, 4), 4)
    rank.channel.send(request(tmp_path, 1, 4))
    wait_for(service)
    assert rank.answer()["error"] is None
    assert [folder.name[-1] for folder in checkpoint_folders(tmp_path)] == ["4", "3"]
    assert service._writer.process.pid != pid


def test_a_running_writer_gets_new_buffers(tmp_path: Path, service: CheckpointService) -> None:
    rank = write(service, tmp_path, 3)
    before = psutil.Process().num_fds()
    os.close(rank.add_buffer(0, 4))  # in place of the memory that the writer knows
    service.handle()
    assert psutil.Process().num_fds() == before
    os.close(rank.add_buffer(1, 5))
    for slot, step in ((0, 4), (1, 5)):
        rank.channel.send(request(tmp_path, slot, step))
    wait_for(service)
    assert [rank.answer()["error"] for _ in range(3)] == [None] * 3
    assert [folder.name[-1] for folder in checkpoint_folders(tmp_path)] == ["5", "4", "3"]


def test_a_writer_that_dies_after_its_answer_gives_its_rank_no_error(
    tmp_path: Path, make_service: MakeService
) -> None:
    """The checkpoint is durable then; only older ones are not deleted yet."""

    def perform(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
        answer(written(asked["step"]))
        os.kill(os.getpid(), signal.SIGKILL)

    rank = write(make_service(perform), tmp_path, 3)
    assert rank.answer()["error"] is None
    assert rank.channel.receive() is None


def test_a_rank_gets_an_error_if_no_writer_starts(tmp_path: Path) -> None:
    def start() -> NoReturn:
        raise OSError(errno.EAGAIN, "no more processes")

    service = CheckpointService(start)
    rank = write(service, tmp_path, 3)
    assert "no more processes" in rank.answer()["error"][1]
    assert not shared_buffer.is_writing(service.memory_fds()[0])
    service.close()


def test_the_writer_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writer, 2)  # The writer gets it, too, and nobody else has it open.
            os.close(writer)
            service = CheckpointService()
            write(service, tmp_path, 3)
            assert service._writer is not None
            os.write(2, b"written")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1000) == b"written"
    assert select.select([reader], [], [], 120)[0], "the writer lives on"
    assert os.read(reader, 1000) == b""
    os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_writer_that_does_not_end_is_killed(tmp_path: Path, make_service: MakeService) -> None:
    def perform(held: shared_buffer.MappedFile, asked: Request, answer: Answer) -> None:
        time.sleep(1000)
        raise AssertionError

    service = make_service(perform)
    rank = Rank(service)
    rank.add_buffer(0, 3)
    for _ in range(2):
        rank.channel.send(request(tmp_path, 0, 3))
    assert not service.finish(0.1)
    assert not service.is_writing()


def test_errors_of_a_write_keep_their_type(tmp_path: Path, service: CheckpointService) -> None:
    (tmp_path / "file").touch()
    folder = new_folder(tmp_path / "run")
    rank = write(service, tmp_path / "file", 3, run_dir=str(folder.path))
    error = writer_process.error_of(rank.answer())
    assert "could not be written to" in str(error) and "Older checkpoints are untouched" in str(error)
    (event,) = folder.events()
    assert (event["event"], event["about"]) == ("warned", "checkpoint")
    assert "could not be written" in event["text"]


def test_an_unexpected_error_of_a_write_is_named(
    tmp_path: Path, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, "quota used up")

    monkeypatch.setattr(os, "write", refuse)
    rank = write(make_service(writer_process.perform), tmp_path, 7)
    assert "quota used up" in rank.answer()["error"][1]


def test_a_writer_does_not_hash_its_checkpoints_again(
    tmp_path: Path, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = tmp_path / "hashed"

    def verify(folder: Path) -> None:
        with hashed.open("a") as log:
            log.write(f"{folder.name}\n")

    monkeypatch.setattr(retention, "verify", verify)
    service = make_service(writer_process.perform)
    rank = Rank(service)
    descriptor = rank.add_buffer(0, 1)
    for step in (1, 2, 3, 4):
        fill(descriptor, step)
        rank.channel.send(request(tmp_path / "checkpoints", 0, step))
        wait_for(service)
        assert rank.answer()["error"] is None
    assert [folder.name[-1] for folder in checkpoint_folders(tmp_path / "checkpoints")] == ["4", "3", "2"]
    assert not hashed.exists()
