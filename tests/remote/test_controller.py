"""Start and end of workers, and the death of one of them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from contextlib import suppress

import pytest
import torch

from slurmddp import remote
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.host.ports import listen
from slurmddp.remote import controller as module
from slurmddp.remote.channel import NO_DATA
from slurmddp.remote.connection import Node
from slurmddp.remote.message_encoding import BYE

pytestmark = pytest.mark.distributed


class Bomb:
    """An object whose bytes would run a command when they are unpickled."""

    def __reduce__(self):
        return os.abort, ()


@pytest.fixture
def stranger(monkeypatch):
    """Connect a process without the secret before the workers; return its connection and the address."""
    found = {}
    listen = module.listen

    def listen_and_call(*args):
        listener = listen(*args)
        found["address"] = listener.getsockname()
        found["end"] = socket.create_connection(found["address"])
        found["end"].sendall(pickle.dumps(Bomb()) + b"\n")
        return listener

    monkeypatch.setattr(module, "listen", listen_and_call)
    yield found
    found["end"].close()


@pytest.fixture
def alone(monkeypatch):
    """Put aside the workers that other tests share."""
    monkeypatch.setattr(remote.workers, "current", None)


def test_g9_g12_a_stranger_is_turned_away_and_a_dead_worker_is_an_error_of_each_use(alone, stranger):
    with remote.workers(3) as w:
        assert stranger["address"][0] == "127.0.0.1"
        stranger["end"].settimeout(30)
        assert b"controller" in stranger["end"].recv(4096)
        with suppress(ConnectionResetError):
            assert stranger["end"].recv(1) == b"", "closed, and nothing was unpickled"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(stranger["address"])

        x, y = remote.ones(3, node=1), remote.ones(3, node=2)
        w.synchronize()
        os.kill(w.node(1).pid, signal.SIGKILL)
        with pytest.raises(remote.WorkerLostError, match=rf"Worker 1 \(process {w.node(1).pid} on"):
            x.fetch()
        for use in (
            lambda: x + 1,
            lambda: remote.zeros(2, node=1),
            lambda: x.dist_send(node=2),
            lambda: y.dist_send(node=1),
            lambda: remote.send(torch.ones(3), 1),
            lambda: w.all_reduce([x, y]),
            lambda: w.all_gather([remote.ones(3, node=0), x]),
        ):
            with pytest.raises(remote.WorkerLostError, match="on another worker"):
                use()
        z = remote.full((3,), 2.0, node=0)
        w.all_reduce([y, z])
        w.synchronize()
        assert y.tolist() == z.tolist() == [3.0] * 3, "the others go on, together too"
    with pytest.raises(SlurmddpError, match="workers were closed"):
        y.fetch()
    with pytest.raises(ConfigError, match="No workers are open"):
        remote.send(torch.ones(3), 1)


def test_a_worker_that_does_not_start_and_a_wrong_number_are_refused(w, alone, monkeypatch):
    with pytest.raises(ConfigError, match="workers\\(0\\)"):
        remote.workers(0)
    with pytest.raises(ConfigError, match="needs a number of workers"):
        remote.workers()
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(SlurmddpError, match="0, 1 of 2 did not start"):
        remote.workers(2)
    with pytest.raises(ConfigError, match=r"10000\) is too much"):
        remote.workers(10_000)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="still open"):
        remote.workers(2)


def test_g12_strangers_in_any_number_are_heard_a_few_at_a_time(alone, monkeypatch):
    """Each would cost a thread; one that sends a byte now and then would hold it for ever."""
    held, strangers, at_once = [0], [], []

    def listen_and_call(*where):
        listener = listen(*where)
        strangers.extend(socket.create_connection(listener.getsockname()[:2]) for _ in range(9))
        return listener

    def meet(end, *facts):
        held[0] += 1
        at_once.append(held[0])
        try:
            return really(end, *facts)
        finally:
            held[0] -= 1

    really = module.channel.meet
    monkeypatch.setattr(module, "listen", listen_and_call)
    monkeypatch.setattr(module.channel, "meet", meet)
    monkeypatch.setattr(module, "_MOST_STRANGERS", 2)
    monkeypatch.setattr(module, "_PROOF_S", 0.2)
    with remote.workers(1) as w:
        assert remote.ones(2, node=0).tolist() == [1.0, 1.0] and len(w) == 1
    assert max(at_once) <= 3 and len(at_once) == 10
    for stranger in strangers:
        stranger.close()


def test_a_tensor_that_is_dropped_while_the_workers_close_lets_them_close():
    """A collection of garbage drops it, in any thread."""
    sending, sent = threading.Event(), []

    class Connection:
        def send(self, text, data):
            sent.append(text)
            assert sending.wait(240)

        def receive(self):
            raise EOFError("closed")

    node = Node(Connection(), (0, "here", 1, "cpu"), lambda node, facts: None)
    node._unsent.put(("first", NO_DATA, None))
    for command in (BYE, '[[null],"free",[1],[]]'):
        node._unsent.put((command, NO_DATA, None))
    sending.set()
    node._sender.join(60)
    assert not node._sender.is_alive() and sent[-1].endswith(BYE)
