"""Agents that meet among strangers: other programs on their ports, callers without a secret, forged words."""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import threading
import time

import pytest

from slurmddp.launchers.link import hub
from slurmddp.launchers.link.connection import CLOSED, Connection, Secret
from support.runs.links import (
    LIMIT_S,
    SECRET,
    ManualClock,
    Star,
    a_launch,
    by_manual_clocks,
    pass_s,
    ports_of,
    running,
    text_message,
)

NONCE = "ab" * 16
HALF = {"slurmddp": 1, "nonce": NONCE}
"""How a hub begins."""


def frame(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


@contextlib.contextmanager
def program(port, says):
    """A program that has nothing to do with us and holds `port`: it says its words to every caller."""
    with socket.create_server(("127.0.0.1", port)) as server, contextlib.ExitStack() as calls:
        over = threading.Event()
        server.settimeout(0.02)

        def serve():
            while not over.is_set():
                with contextlib.suppress(OSError):
                    call = calls.enter_context(server.accept()[0])
                    call.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


WORDS = {
    "nothing": b"",
    "a mail server": b"220 mail.example ESMTP\r\n",
    "zeros": bytes(5000),
    "the end of a number": b"\x00\x00",
    "a huge frame": b"\x7f\xff\xff\xff",
    "no json": frame(b"\xff\xfe"),
    "deep json": frame(b"[" * 2000),
    "a long number": frame(b"9" * 2000),
    "another version": frame({"slurmddp": 2, "nonce": NONCE}),
    "half a hub": frame(HALF),
    "a hub without proof": frame(HALF) + frame({"said": [0, "n0"], "proof": "00"}),
    "a hub with a strange proof": frame(HALF) + frame({"said": [0, "n0"], "proof": 7}),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_programs_that_hold_the_first_ports_are_passed_by(star, words):
    launch = a_launch()
    two = Star(2, launch_id=launch, clocks={0: ManualClock(), 1: ManualClock()})
    with program(ports_of(launch)[0], words), program(ports_of(launch)[1], words):
        star(two).open(1)
        # The member meets the strangers before its hub is there, and again on the way to it.
        for _ in range(6):
            pass_s(two, 0.5)
            time.sleep(0.02)
        two.open(0)

        def met():
            pass_s(two, 0.5)
            return two.met()

        two.until(met)
        assert two.links[0]._listener.getsockname()[1] in ports_of(launch)[2:]


def call(two):
    return socket.create_connection(two.links[0]._listener.getsockname(), timeout=LIMIT_S)


def test_callers_without_the_secret_are_sent_away_and_stop_nothing(star):
    two = star(Star(2).open(0))
    with contextlib.ExitStack() as calls:
        for words in [*WORDS.values(), frame([]), frame({"said": [1], "proof": "0" * 64})]:
            calls.enter_context(call(two)).sendall(words)
        calls.enter_context(call(two)).close()
        two.open(1)
        two.until(two.met)
        two.drain()
    assert two.received and not two.losses


def test_a_wrong_secret_is_not_let_in_and_does_not_keep_the_right_one_out(star, monkeypatch):
    refused, drop = [], hub.Hub._drop_caller
    monkeypatch.setattr(
        hub.Hub, "_drop_caller", lambda own, caller: (refused.append(caller), drop(own, caller))
    )
    three = star(Star(3).open(0))
    three.open(1, secret="no" * 32)
    three.until(lambda: refused)
    three.open(2)
    three.until(lambda: three.met(2))
    three.drain(1)
    assert three.links[0].missing() == [1]
    assert three.links[1].missing() == [0]
    assert three.links[1].handle() == []


def test_a_caller_who_says_nothing_is_sent_away_in_time(star):
    two = star(Star(2, clocks={0: ManualClock()}).open(0))
    with call(two) as silent:
        two.until(lambda: two.links[0]._callers)
        assert silent.recv(1000).startswith(frame({})[:2])
        pass_s(two, 4)
        assert two.links[0]._callers
        pass_s(two, 3)
        assert two.links[0]._callers == {}
        assert silent.recv(1000) == b""


def test_callers_who_say_nothing_do_not_crowd_out_the_members(star):
    two = star(Star(2).open(0))
    most = two.links[0]._max_callers
    with contextlib.ExitStack() as calls:
        for _ in range(2 * most):
            calls.enter_context(call(two))
        two.until(lambda: len(two.links[0]._callers) == most)
        two.open(1)
        two.until(two.met)
        assert len(two.links[0]._callers) <= most


class Full:
    """A listener in a process that may open no more files."""

    def __init__(self, real):
        self.fileno = real.fileno

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_hub_that_may_open_no_more_makes_room(star):
    two = star(Star(2, clocks={0: ManualClock()}).open(0))
    hub = two.links[0]
    with call(two) as silent:
        two.until(lambda: hub._callers)
        real, hub._listener = hub._listener, Full(hub._listener)
        with call_to(real):
            two.until(lambda: not hub._callers)
        hub._listener = real
        silent.settimeout(LIMIT_S)
        assert list(iter(lambda: silent.recv(1000), b"")), "it was greeted, and then its connection closed"


def test_a_hub_that_may_open_no_more_and_has_no_room_to_make_rests_until_its_next_look(star):
    two = star(Star(2, clocks={0: ManualClock()}).open(0))
    two.turn()
    hub = two.links[0]
    real, hub._listener = hub._listener, Full(hub._listener)
    with call_to(real):
        select.select(hub.descriptors(), [], [])
        two.turn()
        assert select.select(hub.descriptors(), [], [], 0)[0] == []
        hub._listener = real
        pass_s(two, 2)
        two.until(lambda: hub._callers)
    two.open(1)
    two.until(two.met)


def call_to(listener):
    return socket.create_connection(listener.getsockname(), timeout=LIMIT_S)


def test_a_proof_that_was_overheard_is_of_no_use_again(star):
    two = star(Star(2).open(0))
    hub = two.links[0]
    secret = Secret(SECRET, two.launch_id)

    def introduce(nonce):
        join = [1, "n1", "me", 0, NONCE]
        return frame({"said": join, "proof": secret.proof("member", nonce, *join)})

    def hear(connection):
        two.until(lambda: select.select([connection], [], [], 0)[0])
        return json.loads(connection.recv(1000)[4:] or b"null")

    with call(two) as one, call(two) as other:
        words = introduce(hear(one)["nonce"])
        hear(other)
        other.sendall(words)  # before it is used
        assert hear(other) is None
        one.sendall(words)
        assert hear(one)["said"] == [0, socket.gethostname()]
    assert (0, 1) in two.arrivals
    assert hub.missing() == []


def sealed_pair():
    """Return the two ends of a proven connection, and what an attacker sees in between."""
    ends, poll = socket.socketpair(), select.epoll()
    wires = [Connection(end, poll) for end in ends]
    for end in ends:
        end.setblocking(False)
    wires[0].secure(b"there", b"back")
    wires[1].secure(b"back", b"there")
    return wires, ends


def overheard(said):
    """Return the bytes of these words on a proven connection."""
    (one, _), ends = sealed_pair()
    seen = []
    for value in said:
        one.put(value)
        seen.append(ends[1].recv(1 << 16))
    one.close()
    ends[1].close()
    return seen


FORGED = {
    "said twice": lambda a, b: [a, a],
    "in another order": lambda a, b: [b, a],
    "left out": lambda a, b: [b],
    "changed": lambda a, b: [a[:-3] + b'9"]'],
    "unsealed": lambda a, b: [frame(["word", "1"])],
    "too short for a seal": lambda a, b: [frame(b"[]")],
    "from the other direction": lambda a, b: [reflected()],
    "huge": lambda a, b: [(1 << 21).to_bytes(4, "big")],
}


def reflected():
    (_, other), ends = sealed_pair()
    other.put(["word", "1"])
    data = ends[0].recv(1 << 16)
    other.close()
    ends[0].close()
    return data


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_words_end_the_connection_unheard(forge):
    said = [["word", "1"], ["word", "2"]]
    (one, other), ends = sealed_pair()
    for data in forge(*overheard(said)):
        ends[0].sendall(data)
    other.read()
    heard = []
    while (value := other.next()) is not None:
        heard.append(value)
    assert other.ended == CLOSED
    assert heard in ([], said[:1])
    one.close()
    other.close()


def test_words_on_a_proven_connection_come_as_they_were_said():
    said = [["word", "1"], ["word", "2"]]
    (one, other), ends = sealed_pair()
    ends[0].sendall(b"".join(overheard(said)))
    other.read()
    assert [other.next(), other.next(), other.next()] == [*said, None]
    assert other.ended is None
    one.close()
    other.close()


def test_whoever_breaks_into_a_connection_is_not_heard_and_the_member_counts_as_lost(star):
    two = star(running(2))
    two.links[1]._connection._end.sendall(frame(["message", 1, text_message("forged")]))
    two.until(lambda: two.losses)
    assert (0, 1, "connection closed") in two.losses
    assert two.texts(0) == []


def test_the_secret_is_never_said(star, monkeypatch):
    sent, put = [], Connection.put
    monkeypatch.setattr(
        Connection, "put", lambda wire, value: (sent.append(json.dumps(value)), put(wire, value))
    )
    two = star(by_manual_clocks(2))
    pass_s(two, 3)
    two.drain()
    assert len(sent) > 6
    assert not [text for text in sent if SECRET in text]


def test_proofs_are_bound_to_secret_launch_speaker_and_every_value():
    proof = Secret("s", "1.0").proof("member", NONCE, 1)
    assert Secret("s", "1.0").proves(proof, "member", NONCE, 1)
    for secret, launch, said in [
        ("t", "1.0", ("member", NONCE, 1)),
        ("s", "1.1", ("member", NONCE, 1)),
        ("s", "1.0", ("hub", NONCE, 1)),
        ("s", "1.0", ("member", NONCE, 2)),
    ]:
        assert not Secret(secret, launch).proves(proof, *said)
    for strange in (None, 3, "", "\u00e4" * 64, "\ud800", [proof]):
        assert not Secret("s", "1.0").proves(strange, "member", NONCE, 1)
