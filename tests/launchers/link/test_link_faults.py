"""Agents that end, fall silent, are stopped, or are cut off from each other by the network."""

from __future__ import annotations

import select
import socket
import time

import pytest

from slurmddp.launchers.link.connection import CUT, Awake, Connection, Session
from support.runs.links import ManualClock, Star, by_manual_clocks, pass_s, running, text_message


def test_a_member_that_ends_is_lost_at_once(star):
    three = star(running(3))
    three.links[1].send(0, text_message("last words"))
    three.links.pop(1).close(farewell=False)
    three.until(lambda: three.losses)
    assert three.losses == [(0, 1, "connection closed")]
    assert three.texts(0) == [(1, text_message("last words"))]
    assert three.links[0].missing() == []
    three.links[0].send(2, text_message("go on"))
    three.links[0].send(1, text_message("nobody hears it"))
    three.until(lambda: three.texts(2))


def test_a_member_that_gave_up_its_first_connection_is_not_lost(star):
    two = star(Star(2).open())
    member = two.links[1]
    member._answer_s = 0.05
    two.until(lambda: member._attempt and member._attempt.greeting)
    first = member._attempt
    two.until(lambda: member._attempt is not first, 0)  # The hub is too busy to answer the proof in time.
    two.until(two.met)
    two.drain()
    assert two.losses == []


def test_a_hub_that_ends_is_lost_to_all_at_once(star):
    three = star(running(3))
    three.links.pop(0).close(farewell=False)
    three.until(lambda: len(three.losses) == 2)
    assert sorted(three.losses) == [(1, 0, "connection closed"), (2, 0, "connection closed")]
    assert three.links[1].missing() == [0]
    three.links[1].send(0, text_message("nobody hears it"))
    three.turn()
    assert len(three.losses) == 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_farewell_is_no_loss_and_comes_after_all_that_was_said(star, node):
    two = star(running(2))
    long = text_message("x" * 1_000_000)
    two.links[node].send(1 - node, long)
    two.links.pop(node).close()
    other = two.links[1 - node]
    two.until(lambda: other._gone if node == 0 else other._peers[1].gone)
    two.turn()
    assert two.texts(1 - node) == [(node, long)]
    assert two.losses == []


@pytest.mark.parametrize("blocked", [0, 1])
def test_an_agent_that_waits_for_its_files_is_not_lost_while_its_kernel_answers(star, blocked):
    """A file server that stops for two minutes blocks agents, whose hosts are well."""
    two = star(by_manual_clocks(2))
    pass_s(two, 130, blocked)
    assert two.losses == []
    two.drain()
    assert two.losses == []
    pass_s(two, 152, blocked)
    assert two.losses == [(1 - blocked, blocked, "no heartbeat for 150 s")]


def test_a_member_sends_a_silent_hub_frames_that_its_kernel_acknowledges(star, monkeypatch):
    two = star(by_manual_clocks(2))
    sent = []
    monkeypatch.setattr(two.links[1]._connection, "put", sent.append)
    pass_s(two, 9, 0)
    assert len(sent) in (6, 7)
    assert all(frame[0] == "echo" for frame in sent)


def test_acknowledgements_of_the_kernel_have_an_age():
    """The kernel acknowledges bytes that no process reads; a closed connection is acknowledged no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        end.setblocking(False)
        connection = Connection(end, select.epoll())
        connection.put(["echo", 0])
        assert connection.is_acknowledged(60.0)
        time.sleep(0.02)
        assert not connection.is_acknowledged(0.001)
        connection.close()
        assert not connection.is_acknowledged(60.0)


def test_a_silent_member_is_lost_after_a_while(star, unreachable):
    three = star(by_manual_clocks(3))
    pass_s(three, 9, 1)
    assert three.losses == []
    pass_s(three, 3, 1)
    assert three.losses == [(0, 1, "no heartbeat for 10 s")]
    three.turn()  # The member looks again, and finds itself left.
    three.until(lambda: len(three.losses) == 2)
    assert three.losses[1:] == [(1, 0, "connection closed")]
    assert three.links[0].missing() == []


def test_a_hub_counts_the_members_that_fell_silent_together(star, unreachable):
    three = star(by_manual_clocks(3))
    pass_s(three, 1, 1)
    pass_s(three, 12, 1, 2)
    assert three.together == [(0, 1, 2), (0, 2, 2)]


def test_a_member_that_falls_silent_alone_is_counted_with_nobody(star, unreachable):
    three = star(by_manual_clocks(3))
    pass_s(three, 12, 1)
    assert three.together == [(0, 1, 0)]
    pass_s(three, 12, 2)
    assert (0, 2, 1) in three.together, "the first loss lies too far back"


def test_a_member_whose_connection_has_closed_is_not_counted_as_silent(star, unreachable):
    three = star(by_manual_clocks(3))
    three.links.pop(1).close(farewell=False)
    three.until(lambda: three.losses)
    pass_s(three, 12, 2)
    assert three.together == [(0, 1, None), (0, 2, 1)]


def test_a_silent_hub_is_lost_after_a_while(star, unreachable):
    three = star(by_manual_clocks(3))
    pass_s(three, 9, 0)
    assert three.losses == []
    pass_s(three, 3, 0)
    assert sorted(three.losses) == [(1, 0, "no heartbeat for 10 s"), (2, 0, "no heartbeat for 10 s")]


def test_a_hub_that_was_stopped_calls_nobody_lost(star, unreachable):
    three = star(by_manual_clocks(3))
    for clock in three.clocks.values():
        clock.now += 1.0
    three.turn()
    three.clocks[0].now += 20.0  # Nobody else has looked either, so nothing has queued up for the hub.
    three.turn(1, 2)
    three.turn(1, 2)
    three.drain()
    assert three.losses == []
    # And it goes on to be a hub that notes who is silent.
    pass_s(three, 12, 1)
    assert three.losses == [(0, 1, "no heartbeat for 10 s")]


def test_a_hub_reads_what_has_queued_up_before_it_calls_anyone_lost(star):
    two = star(by_manual_clocks(2))
    hub, member = two.links[0], two.links[1]
    pass_s(two, 9, 1)
    member.handle()  # It answers the questions of nine seconds, just before it would count as lost.
    two.clocks[0].now += 1.9
    assert hub.handle() == []
    assert two.losses == []


def test_a_member_that_was_stopped_for_long_does_not_call_the_hub_lost(star):
    two = star(by_manual_clocks(2))
    two.clocks[1].now += 20.0
    two.turn(0)
    two.turn(0)
    two.drain()
    assert two.losses == []


def test_looking_away_makes_nobody_silent():
    clock = ManualClock()
    awake = Awake(clock.read, 2.0)
    clock.now += 1.5
    assert awake.update() == 1.5
    clock.now += 600.0
    assert awake.update() == 3.5
    assert awake.moment(4.0) == clock.now + 0.5


class Deaf:
    """Between here and there the network is cut: nothing comes, nothing goes, and nobody is told."""

    def __init__(self, wire):
        self._connection = wire
        self.ended = None

    def put(self, value):
        """Let it go nowhere."""

    read = flush = lambda self: None

    def is_acknowledged(self, within_s):
        return False

    def next(self):
        """Return what comes through: nothing."""

    def fileno(self):
        return self._connection.fileno()

    def close(self):
        self._connection.close()

    forget = close


def cut(two):
    """Cut the connection between the hub and node 1; new ones can be made."""
    hub, member = two.links[0], two.links[1]
    hub._peers[1].connection = Deaf(hub._peers[1].connection)
    member._connection = Deaf(member._connection)


def test_a_short_fault_of_the_network_is_bridged_and_nothing_is_lost_or_told_twice(star):
    two = star(by_manual_clocks(2))
    two.links[0].send(1, text_message("before"))
    two.links[1].send(0, text_message("before"))
    two.until(lambda: two.texts(0) and two.texts(1))
    cut(two)
    for number in range(5):
        two.links[0].send(1, text_message(f"down {number}"))
        two.links[1].send(0, text_message(f"up {number}"))
    pass_s(two, 5)
    two.drain()
    assert [message["text"] for _, message in two.texts(1)] == ["before", *(f"down {n}" for n in range(5))]
    assert [message["text"] for _, message in two.texts(0)] == ["before", *(f"up {n}" for n in range(5))]
    assert two.losses == []
    assert len(two.arrivals) == 2
    pass_s(two, 12)
    assert two.losses == []
    assert two.links[0]._peers[1].session.unconfirmed() == two.links[1]._session.unconfirmed() == []


def test_what_had_arrived_before_the_fault_is_not_told_again(star):
    two = star(by_manual_clocks(2))
    for node in (0, 1):
        two.links[node].send(1 - node, text_message("heard but not confirmed"))
    two.until(lambda: two.texts(0) and two.texts(1))
    cut(two)
    pass_s(two, 5)
    two.drain()
    assert len(two.texts(0)) == len(two.texts(1)) == 1
    assert two.losses == []


@pytest.mark.parametrize("node", [0, 1])
def test_an_error_of_the_network_is_no_end_of_the_other(star, node):
    two = star(by_manual_clocks(2))
    cut(two)
    (two.links[0]._peers[1].connection if node == 0 else two.links[1]._connection).ended = CUT
    two.links[1].send(0, text_message("hello again"))
    pass_s(two, 6)
    two.drain()
    assert two.losses == []
    assert two.texts(0) == [(1, text_message("hello again"))]


def test_the_end_of_the_old_connection_may_be_seen_before_the_new_one_stands(star):
    two = star(by_manual_clocks(2))
    member = two.links[1]
    pass_s(two, 4, 0)  # The hub is slow, so the member tries a second connection.
    while member._attempt is None or not member._attempt.nonce:
        two.turn()
    wire = member._attempt.connection
    wire.read = lambda: None
    two.until(lambda: member._connection is None)
    assert two.losses == []
    del wire.read
    two.until(lambda: member._connection is wire)
    two.drain()
    assert two.losses == []


def test_a_hub_that_ends_while_a_second_connection_is_tried_is_lost_at_once(star):
    two = star(by_manual_clocks(2))
    member = two.links[1]
    pass_s(two, 4, 0)
    wire = member._attempt.connection
    wire.read = lambda: None  # Its end comes later than that of the first connection.
    two.links.pop(0).close(farewell=False)
    two.until(lambda: member._connection is None)
    assert two.losses == []
    del wire.read
    two.until(lambda: two.losses)
    assert two.losses == [(1, 0, "connection closed")]


def test_a_member_cut_off_for_too_long_is_lost_and_stays_lost(star):
    two = star(by_manual_clocks(2))
    two.links[1]._endpoints = []
    two.links[1]._begin_walk()
    cut(two)
    pass_s(two, 12)
    assert sorted(two.losses) == [(0, 1, "no heartbeat for 10 s"), (1, 0, "no heartbeat for 10 s")]
    pass_s(two, 5)
    assert len(two.losses) == 2


def test_a_second_agent_of_one_node_is_refused_while_the_first_is_here(star, caplog):
    two = star(running(2))
    second = star(Star(2, launch_id=two.launch_id).open(1))

    def refused():
        two.turn()
        return "a second agent for this node" in caplog.text

    second.until(refused)
    two.drain()
    assert two.losses == []
    assert second.received == []


def test_a_new_agent_may_take_the_place_of_a_lost_one(star):
    two = star(running(2))
    two.links.pop(1).close(farewell=False)
    two.until(lambda: two.losses)
    two.received.clear()
    two.links[0].send(1, text_message("to the lost one"))
    two.open(1)
    two.until(two.met)
    two.drain()
    assert two.texts(1) == []


def test_messages_are_numbered_kept_and_forgotten():
    one, other = Session(), Session()
    frames = [one.numbered(text_message(str(number))) for number in range(3)]
    assert [other.is_new(frame[1]) for frame in frames] == [True] * 3
    assert [other.is_new(frame[1]) for frame in frames] == [False] * 3
    one.confirm(2)
    assert one.unconfirmed() == frames[2:]
    one.confirm(other.received)
    assert one.unconfirmed() == []


def test_heartbeats_keep_a_quiet_line_alive(star):
    two = star(by_manual_clocks(2))
    pass_s(two, 30)
    assert two.losses == []
