"""The proof of the secret in both directions, and frames with HMACs."""

from __future__ import annotations

import socket
import threading

import pytest

from slurmddp.launchers.link.connection import Secret
from slurmddp.remote import channel

FACTS = {"rank": 0, "pid": 1, "device": "cpu"}


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def meet(ends, ours, theirs):
    """Let both sides prove their secrets; return the controller's result, and the worker's or its error."""
    found = []

    def join():
        try:
            found.append(channel.join(ends[1], Secret(theirs, "controller"), **FACTS))
        except (OSError, EOFError) as error:
            found.append(error)

    worker = threading.Thread(target=join)
    worker.start()
    admitted = channel.admit(ends[0], Secret(ours, "controller"))
    worker.join()
    return admitted, found[0]


def test_g12_each_side_turns_away_the_other_without_the_secret(ends):
    admitted, error = meet(ends, "one", "another")
    assert admitted is None and isinstance(error, (OSError, EOFError))


def test_g12_a_worker_leaves_a_controller_that_only_repeats_its_words(ends):
    """A false controller passes a proof by; it can't make its own."""
    ends[0].sendall(b'{"slurmddp": 1, "nonce": "aa"}\n{"proof": "bb"}\n')
    with pytest.raises(ConnectionError, match="does not know the secret"):
        channel.join(ends[1], Secret("one", "controller"), **FACTS)


@pytest.mark.parametrize(
    "garbage",
    [b"\x80\x04junk\n", b"[]\n", b"{}\n", b'{"said": 1, "proof": "x"}\n', b"x" * 9000, b"[" * 2000 + b"\n"],
)
def test_g12_words_that_are_no_proof_are_refused(ends, garbage):
    ends[1].sendall(garbage)
    assert channel.admit(ends[0], Secret("one", "controller")) is None


def test_g12_frames_of_another_or_repeated_ones_end_the_connection(ends):
    (controller, greeting), worker = meet(ends, "one", "one")
    assert (greeting.rank, greeting.host) == (0, socket.gethostname())
    controller.send("first", memoryview(b"data"))
    assert worker.receive() == ("first", b"data")
    worker.send("")
    assert controller.receive() == ("", b"")
    frame = (5).to_bytes(8, "big") + bytes(8) + bytes(16) + b"false"
    ends[0].sendall(frame)
    with pytest.raises(ConnectionError, match="wrong HMAC"):
        worker.receive()
    assert not controller.has_ended()
    worker.close()
    with pytest.raises(EOFError):
        controller.receive()
    assert controller.has_ended()
