"""Agents that find each other, talk and part, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

import psutil
import pytest

from slurmddp.errors import ConfigError, MismatchError, SlurmddpError
from slurmddp.host.ports import CANDIDATES, candidate_ports
from slurmddp.launchers.link import hub, member
from slurmddp.launchers.link.link import open_link
from support.runs.links import (
    LIMIT_S,
    SECRET,
    Star,
    a_launch,
    by_manual_clocks,
    pass_s,
    place,
    ports_of,
    running,
    text_message,
)


def test_all_arrive_and_are_told_of_each_other(star):
    four = star(Star(4).open())
    assert four.links[0].missing() == [1, 2, 3]
    assert four.links[2].missing() == [0]
    four.until(four.met)
    assert sorted(four.received, key=str) == sorted(
        [(0, node, {"kind": "Joined", "host": socket.gethostname()}) for node in (1, 2, 3)]
        + [(node, 0, {"kind": "Joined", "host": socket.gethostname()}) for node in (1, 2, 3)],
        key=str,
    )
    assert [link.missing() for link in four.links.values()] == [[]] * 4


def test_who_is_missing_is_named(star):
    four = star(Star(4).open(0, 1, 3))
    four.until(lambda: four.met(1, 3))
    assert four.links[0].missing() == [2]


def test_the_hub_may_be_late(star):
    three = star(Star(3).open(1, 2))
    member = three.links[1]
    three.until(lambda: member._next_walk > 0)  # It has walked past all ports once and found nobody.
    assert (member.missing(), three.received) == ([0], [])
    three.open(0)
    three.until(three.met)
    assert [link.missing() for link in three.links.values()] == [[]] * 3
    assert three.arrivals == {(1, 0), (2, 0), (0, 1), (0, 2)}
    assert three.losses == []


def test_messages_come_whole_in_order_and_once(star):
    three = star(running(3))
    sent = [text_message(f"{number} {'x' * 100 * number}") for number in range(50)]
    for message in sent:
        three.links[1].send(0, message)
        three.links[0].send(2, message)
    three.until(lambda: len(three.texts(0)) == len(three.texts(2)) == 50)
    assert three.texts(0) == [(1, message) for message in sent]
    assert three.texts(2) == [(0, message) for message in sent]
    assert three.texts(1) == []


def test_what_is_said_before_the_arrival_is_heard_on_arrival(star):
    two = star(Star(2).open(0))
    two.links[0].send(1, text_message("early"))
    two.open(1)
    two.links[1].send(0, text_message("early too"))
    two.until(lambda: two.texts(1) and two.texts(0))
    assert two.texts(0) == [(1, text_message("early too"))]
    for node in (0, 1):
        kinds = [message["kind"] for at, sender, message in two.received if at == node and sender != node]
        assert kinds == ["Joined", "text"]


def test_members_may_tell_the_hub_only_and_nobody_may_tell_strangers(star):
    two = star(running(2))
    for to in (1, 2):
        with pytest.raises(ValueError, match="may send to node 0 only"):
            two.links[1].send(to, text_message("no"))
    for to in (0, 2):
        with pytest.raises(ValueError, match=f"no node {to}"):
            two.links[0].send(to, text_message("no"))


def test_a_message_that_is_too_long_is_refused_where_it_is_said(star):
    two = star(running(2))
    for node in (0, 1):
        with pytest.raises(ValueError, match="more than the 1048576"):
            two.links[node].send(1 - node, text_message("x" * (1 << 20)))
    almost = text_message("y" * ((1 << 20) - 100))
    two.links[0].send(1, almost)
    two.until(lambda: two.texts(1))
    assert two.texts(1) == [(0, almost)]


def test_sixty_four_members(star):
    many = star(running(65))
    for node in range(1, 65):
        many.links[0].send(node, text_message("go"))
        many.links[node].send(0, text_message(f"I am {node}"))
    many.until(lambda: len(many.texts(0)) == 64 and all(many.texts(node) for node in range(1, 65)))
    assert sorted((node, message["text"]) for node, message in many.texts(0)) == [
        (node, f"I am {node}") for node in range(1, 65)
    ]
    assert many.losses == []


def test_two_launches_at_the_same_time_do_not_mix(star):
    stars = [star(Star(2).open()) for _ in range(2)]
    for one in stars:
        one.until(one.met)
        one.links[0].send(1, text_message(one.launch_id))
        one.until(lambda one=one: one.texts(1))
    assert [one.texts(1) for one in stars] == [[(0, text_message(one.launch_id))] for one in stars]


def test_two_of_the_same_name_with_other_secrets_do_not_mix(star):
    old = star(Star(3, secret="01" * 32).open(0, 1))
    old.until(lambda: old.met(1))
    new = star(Star(3, launch_id=old.launch_id, secret="02" * 32).open())

    def both_met():
        old.turn()
        return new.met()

    new.until(both_met)
    assert old.links[0].missing() == [2]
    assert old.arrivals == {(0, 1), (1, 0)}
    assert old.losses == []


def test_an_only_node_opens_no_socket():
    before = psutil.Process().num_fds()
    alone = open_link(place(0, 1, "alone"), "")
    assert psutil.Process().num_fds() == before
    assert (alone.descriptors(), alone.handle(), alone.missing()) == ([], [], [])
    with pytest.raises(ValueError, match="no node 1"):
        alone.send(1, text_message("c"))
    alone.close()


def test_several_nodes_without_a_secret_are_refused():
    with pytest.raises(ConfigError, match="no secret"):
        open_link(place(0, 2, "open"), "")


def test_loopback_between_several_real_nodes_is_refused(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    for node in (0, 1):
        with pytest.raises(MismatchError, match="on every node this address means the node itself"):
            open_link(place(node, 2, "5.0.0", emulated=False), SECRET)


def test_a_hub_away_from_its_host_is_refused():
    with pytest.raises(MismatchError, match="not an address of this machine") as caught:
        open_link(place(0, 2, "5.0.0", emulated=False, master_addr="203.0.113.9"), SECRET)
    assert "203.0.113.9" in caught.value.message


def test_the_hub_listens_on_the_address_that_leads_to_the_others_only(star):
    launch = a_launch()
    real = star(Star(2, launch_id=launch))
    for node in (0, 1):
        info = place(node, 2, launch, emulated=False, master_addr="127.0.0.2")
        real.links[node] = open_link(info, SECRET)
    real.until(real.met)
    listening = {
        (c.laddr.ip, c.laddr.port)
        for c in psutil.Process().net_connections("inet")
        if c.status == psutil.CONN_LISTEN and c.laddr.port in ports_of(launch)
    }
    assert len(listening) == 1
    ((address, port),) = listening
    assert address == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def test_no_free_port_at_all_is_an_error_to_read(monkeypatch):
    launch = a_launch()
    taken = ports_of(launch)[:1]
    monkeypatch.setattr(hub, "candidate_ports", lambda identity: taken)
    with (
        socket.create_server(("127.0.0.1", taken[0])),
        pytest.raises(SlurmddpError, match=f"{taken[0]} first, and none is free"),
    ):
        open_link(place(0, 2, launch), SECRET)


def test_a_hub_whose_ports_are_all_taken_is_found_by_the_attempts_folder(monkeypatch, star, tmp_path):
    launch = a_launch()
    taken = ports_of(launch)[:1]
    (tmp_path / "logs/attempt-2").mkdir(parents=True)
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "2")
    monkeypatch.setattr(hub, "candidate_ports", lambda identity: taken)
    monkeypatch.setattr(member, "candidate_ports", lambda identity: taken)
    monkeypatch.setattr(member, "_PUBLISHED_S", 0.2)
    with socket.create_server(("127.0.0.1", taken[0])):
        two = star(Star(2, launch).open())
        two.until(two.met)
    assert two.links[1].missing() == []


def test_the_line_and_the_rendezvous_of_ranks_look_elsewhere():
    assert len(set(ports_of("7.0.0"))) == CANDIDATES
    assert ports_of("7.0.0") != candidate_ports("7.0.0")


def is_open(descriptor):
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def test_a_forked_child_lets_go_and_takes_nothing_with_it(star):
    before = {number for number in range(1024) if is_open(number)}
    two = star(running(2))
    opened = [number for number in range(1024) if is_open(number) and number not in before]
    assert len(opened) == 5  # two epolls, the listener, and both ends of the connection
    pid = os.fork()
    if pid == 0:
        for link in two.links.values():
            link.close(farewell=False)
        os._exit(sum(map(is_open, opened)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    two.drain()
    assert two.losses == []


@contextlib.contextmanager
def child():
    """A child that holds copies of all descriptors for a while."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_who_is_given_up_hears_of_it_although_a_child_holds_a_copy(star, unreachable):
    two = star(by_manual_clocks(2))
    with child():
        pass_s(two, 12, 1)
        assert two.losses == [(0, 1, "no heartbeat for 10 s")]
        two.until(lambda: len(two.losses) == 2, 0)
    assert two.losses[1] == (1, 0, "connection closed")


def test_a_farewell_is_heard_although_a_child_holds_a_copy(star):
    two = star(running(2))
    with child():
        two.links[1].close()
        two.until(lambda: two.links[0]._peers[1].gone, 1)
    assert two.losses == []


@pytest.mark.parametrize("farewell", [True, False])
def test_a_closed_link_is_quiet(star, farewell):
    two = star(running(2))
    for node in (0, 1):
        link = two.links[node]
        link.close(farewell)
        link.close(farewell)
        link.send(1 - node, text_message("nobody hears it"))
        assert (link.handle(), link.descriptors()) == ([], [])
        assert link.next_deadline() > 0.0


def test_an_agent_is_woken_by_its_descriptors_alone(star):
    two = star(running(2))
    two.drain()
    (descriptor,) = two.links[1].descriptors()
    two.links[0].send(1, text_message("wake up"))
    assert select.select([descriptor], [], [], LIMIT_S)[0] == [descriptor]
    assert (0, text_message("wake up")) in two.links[1].handle()


def test_the_next_deadline_stays_where_it_is(star):
    two = star(running(2))
    for link in two.links.values():
        link.handle()
        first = link.next_deadline()
        assert first <= time.monotonic() + 1.0
        assert link.next_deadline() == pytest.approx(first, abs=1e-6)
