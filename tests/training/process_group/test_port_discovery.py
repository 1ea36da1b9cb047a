"""The candidate ports of a launch, and the tokens of request and response."""

import socket
import threading

import pytest

from slurmddp.host.ports import CANDIDATES, candidate_ports
from slurmddp.training.process_group.port_discovery import Handshake, _read_line

pytestmark = pytest.mark.distributed


def test_candidates_are_distinct_fixed_and_below_the_ephemeral_ports():
    ports = candidate_ports("100.0.0")
    assert ports == candidate_ports("100.0.0")
    assert len(set(ports)) == CANDIDATES
    assert all(15000 <= port < 30000 for port in ports)
    assert set(ports) != set(candidate_ports("100.0.1"))


def test_tokens_follow_from_launch_and_secret_and_do_not_reveal_the_secret():
    handshake = Handshake("1.0.0", "5e" * 32)
    assert handshake.port_in(handshake.response(12345)) == 12345
    messages = {handshake.request(), handshake.response(12345)}
    for other in (Handshake("1.0.1", "5e" * 32), Handshake("1.0.0", "6e" * 32), Handshake("1.0.0", "")):
        assert not messages & {other.request(), other.response(12345)}
        assert other.port_in(handshake.response(12345)) is None
    assert not [message for message in messages if b"5e5e" in message]
    assert "5e5e" not in repr(handshake)


def test_a_peer_that_sends_byte_by_byte_gets_no_more_time_than_a_silent_peer():
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def trickle():
        while not done.wait(0.02):
            theirs.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            _read_line(ours, 0.2)
    finally:
        done.set()
        sender.join()
        ours.close()
        theirs.close()
