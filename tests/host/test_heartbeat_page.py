"""The heartbeat page of a rank, and the channel between a rank and its agent."""

from __future__ import annotations

import os
import signal
import socket
import tempfile

import psutil
import pytest

from slurmddp.checkpoint.memory.channel import MAX_MESSAGE_BYTES, WriterChannel
from slurmddp.environments.names import CHANNEL_VARIABLE, HEARTBEAT_VARIABLE
from slurmddp.host.heartbeat_page import PHASES, HeartbeatPage


def run_in_child(action) -> None:  # type: ignore[no-untyped-def]
    pid = os.fork()
    if pid == 0:
        action()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_what_a_killed_rank_has_shown_stays_readable() -> None:
    page = HeartbeatPage.create()

    def rank() -> None:
        attached = HeartbeatPage.attach({HEARTBEAT_VARIABLE: str(page.descriptor)})
        attached.resumed(6)
        attached.enter("step")
        attached.completed(7, 0.5, 0.125)
        attached.completed(8, 0.25, 0.0)

    run_in_child(rank)
    beat = page.read()
    assert (beat.phase, beat.resumed, beat.step, beat.steps) == ("step", 6, 8, 2)
    assert (beat.step_s, beat.wait_s) == (0.75, 0.125)
    assert beat.since <= beat.stepped
    page.close()


def test_a_page_begins_anew_for_the_next_rank() -> None:
    page = HeartbeatPage.create()
    page.completed(8, 0.25, 0.0)
    page.reset()
    beat = page.read()
    assert (beat.phase, beat.resumed, beat.step, beat.steps, beat.step_s) == (PHASES[0], -1, -1, 0, 0.0)
    assert beat.since > 0
    page.close()


def test_without_an_agent_nobody_reads_and_nothing_breaks() -> None:
    page = HeartbeatPage.attach({})
    page.enter("step")
    assert page.read().phase == "step"
    assert WriterChannel.attach({}) is None
    page.close()


def test_memory_that_a_killed_rank_sent_stays_with_the_service() -> None:
    service, rank_end = WriterChannel.pair()

    def rank() -> None:
        attached = WriterChannel.attach({CHANNEL_VARIABLE: str(rank_end.fileno())})
        assert attached is not None
        descriptor = os.memfd_create("state")
        os.write(descriptor, b"weights")
        attached.send({"kind": "memory", "size": 7}, [descriptor])

    run_in_child(rank)
    received = service.receive(5.0)
    assert received is not None
    message, (descriptor,) = received
    assert message == {"kind": "memory", "size": 7}
    assert os.pread(descriptor, 10, 0) == b"weights"
    os.close(descriptor)
    service.close()
    rank_end.close()


def test_a_line_says_when_there_is_nothing_and_when_nobody_is_left() -> None:
    first, other = WriterChannel.pair()
    assert first.receive() is None
    other.send({"kind": "last"})
    other.close()
    assert first.receive() == ({"kind": "last"}, [])
    with pytest.raises(EOFError):
        first.receive()
    with pytest.raises(OSError):
        first.send({"kind": "nobody"})
    first.close()


def test_a_message_that_is_too_long_is_refused_not_cut() -> None:
    first, other = WriterChannel.pair()
    with pytest.raises(OSError, match="at most"):
        first.send({"kind": "x" * MAX_MESSAGE_BYTES})
    first.send({"kind": "x" * (MAX_MESSAGE_BYTES - 100)})
    assert len(other.receive()[0]["kind"]) == MAX_MESSAGE_BYTES - 100  # type: ignore[index]
    first.close()
    other.close()


def test_descriptors_that_come_without_a_word_are_closed() -> None:
    end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = WriterChannel(end)
    with other, tempfile.TemporaryFile() as file:
        before = psutil.Process().num_fds()
        socket.send_fds(other, [b""], [file.fileno()])
        with pytest.raises(EOFError):
            line.receive(1.0)
        assert psutil.Process().num_fds() == before
    line.close()


def test_what_was_sent_is_heard_though_the_sender_went_without_reading_its_answers() -> None:
    service, rank_end = WriterChannel.pair()
    service.send({"kind": "written"})
    rank_end.send({"kind": "write", "step": 7})
    rank_end.close()
    received = service.receive(30)
    assert received is not None and received[0]["step"] == 7
    with pytest.raises(EOFError):
        service.receive(30)
    service.close()


def test_a_number_that_is_no_line_here_is_passed_over() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    assert WriterChannel.attach({CHANNEL_VARIABLE: str(reader)}) is None
    os.close(reader)
    assert WriterChannel.attach({CHANNEL_VARIABLE: str(reader)}) is None
