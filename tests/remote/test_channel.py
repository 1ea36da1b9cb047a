"""The proof of the secret in both directions, and frames with HMACs."""

from __future__ import annotations

import socket
import threading

import pytest

from slurmddp.launchers.link.connection import Seal
from slurmddp.remote import channel


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def meet(ends, ours, theirs):
    """Let both sides prove their secrets; return the result or the error of the controller and the worker."""
    found = {}

    def call(name, function, *args):
        try:
            found[name] = function(*args)
        except ConnectionError as error:
            found[name] = error

    worker = threading.Thread(
        target=call, args=("worker", channel.meet, ends[1], theirs, "worker", 0, "host")
    )
    worker.start()
    call("controller", channel.meet, ends[0], ours, "controller")
    worker.join()
    return found["controller"], found["worker"]


def test_g12_each_side_turns_away_the_other_without_the_secret(ends):
    for error in meet(ends, "one", "another"):
        assert isinstance(error, ConnectionError) and "knows the secret: a wrong proof" in str(error)


def test_g12_the_proof_of_one_side_sent_back_to_it_proves_nothing(ends):
    """A stranger without the secret repeats all that the controller sends."""

    def repeat():
        stranger = channel.Channel(ends[1])
        for _ in range(2):
            stranger.send(stranger.receive()[0])

    echo = threading.Thread(target=repeat)
    echo.start()
    with pytest.raises(ConnectionError, match="a wrong proof"):
        channel.meet(ends[0], "one", "controller")
    echo.join()


def framed(text):
    sizes = len(text).to_bytes(8, "big") + bytes(8)
    return sizes + Seal(b"").next(sizes + text) + text


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x80\x04junk\n",
        b"x" * 9000,
        framed(b"x" * 3000),
        framed(b"[")[:-1] + b"x",
        *map(framed, (b"[]", b"{}", b"1", b'["worker"]', b"[" * 2000, b"\xff")),
    ],
)
def test_g12_words_that_are_no_proof_are_refused(ends, garbage):
    ends[1].sendall(garbage)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="has not proved"):
        channel.meet(ends[0], "one", "controller")
    assert ends[0].fileno() == -1, "closed"


def test_g12_frames_of_another_or_repeated_ones_end_the_connection(ends):
    (controller, facts), (worker, _) = meet(ends, "one", "one")
    assert facts == [0, "host"]
    controller.send("first", memoryview(b"data"))
    assert worker.receive() == ("first", b"data")
    worker.send("")
    assert controller.receive() == ("", b"")
    frame = (5).to_bytes(8, "big") + bytes(8) + bytes(16) + b"false"
    ends[0].sendall(frame)
    with pytest.raises(ConnectionError, match="wrong HMAC"):
        worker.receive()
    worker.close()
    with pytest.raises(EOFError):
        controller.receive()
