"""Who sends a byte now and then at a beacon holds up nobody for longer than one who is silent."""

import socket
import threading

import pytest

from slurmddp.training.process_group import port_discovery

pytestmark = pytest.mark.distributed


def test_a_peer_that_trickles_has_no_more_time_than_one_that_is_silent():
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle():
        while not over.wait(0.02):
            theirs.send(b"x")

    stranger = threading.Thread(target=trickle)
    stranger.start()
    try:
        with pytest.raises(TimeoutError):
            port_discovery._read_line(ours, 0.2)
    finally:
        over.set()
        stranger.join()
        ours.close()
        theirs.close()
