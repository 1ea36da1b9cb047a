"""Ranks that find each other. Each rank is a thread here: the meeting is all sockets, and nothing else."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from slurmddp.errors import MismatchError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.host.address import LOOPBACK
from slurmddp.host.ports import candidate_ports
from slurmddp.training.process_group import port_discovery, rendezvous
from slurmddp.training.process_group.port_discovery import Beacon, Words
from slurmddp.training.process_group.rendezvous import open_store
from support.distributed.meetings import listener, meet, on_two_nodes, rank, talk
from support.runs.launch_ports import a_launch

pytestmark = pytest.mark.distributed


def test_four_ranks_share_a_store():
    launch = a_launch()
    stores = meet([rank(number, 4, launch) for number in range(4)])
    for number, store in enumerate(stores):
        store.set(f"from {number}", str(number))
    assert [store.get("from 2") for store in stores] == [b"2"] * 4


def test_rank_zero_may_be_late():
    launch = a_launch()
    infos = [rank(1, 3, launch), rank(2, 3, launch)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(open_store, info, 120.0) for info in infos]
        first = open_store(rank(0, 3, launch), 120.0)
        first.set("key", "value")
        assert [future.result().get("key") for future in waiting] == [b"value"] * 2


def test_two_launches_on_one_machine_do_not_mix():
    stores = meet([rank(number, 2, launch) for launch in (a_launch(), a_launch()) for number in (0, 1)])
    stores[0].set("who", "seven")
    stores[2].set("who", "eight")
    assert stores[1].get("who") == b"seven"
    assert stores[3].get("who") == b"eight"


def test_a_requeue_finds_its_own_rank_zero_while_the_old_one_still_listens(monkeypatch):
    ports, over = candidate_ports(a_launch()), threading.Event()
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: ports)
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(open_store, rank(0, 2, "9.0.0"), 600.0, stopped=over.is_set)
        try:
            talk(ports[0], b"are you there?\n")
            new = meet([rank(0, 2, "9.0.1"), rank(1, 2, "9.0.1")])
            new[0].set("restart", "1")
            assert new[1].get("restart") == b"1"
        finally:
            over.set()
        with pytest.raises(StoppedAtCheckpoint, match="before the ranks had met"):
            old.result()


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n" * 20,
        b"slurmddp-1 other\n",
        b"slurmddp-1 x\n",
        b"slurmddp-1 1\n",
        b"slurmddp-1 1 %s\n" % (b"0" * 64),
        Words("some other launch").answer(1) + b"\n",
    ],
)
def test_ports_that_others_hold_are_passed_by(answer):
    launch = a_launch()
    ports = candidate_ports(launch)
    with listener(ports[0], answer), listener(ports[1], answer):
        stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"


def test_a_port_that_accepts_and_never_answers_is_passed_by(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", (0.1, 0.1))
    launch = a_launch()
    with listener(candidate_ports(launch)[0]):
        stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"


def test_no_free_port_at_all_is_an_error_to_read(monkeypatch):
    launch = a_launch()
    taken = candidate_ports(launch)[:2]
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: taken)
    with listener(taken[0]), listener(taken[1]), pytest.raises(SlurmddpError, match=f"{taken[0]} first"):
        open_store(rank(0, 2, launch), 5.0)


def test_a_stranger_gets_no_port_and_does_not_stop_the_meeting():
    launch = a_launch()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(open_store, rank(0, 2, launch), 120.0)
        for words in (Words("14.0.0").question() + b"\n", b"GET / HTTP/1.1\r\n\r\n", b""):
            answer = talk(candidate_ports(launch)[0], words)
            assert not any(character in answer for character in b"23456789")
        one = open_store(rank(1, 2, launch), 120.0)
        zero.result().set("key", "value")
        assert one.get("key") == b"value"


def test_callers_that_say_nothing_hold_up_nobody():
    launch = a_launch()
    port = candidate_ports(launch)[0]
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as callers:
        zero = pool.submit(open_store, rank(0, 2, launch), 120.0)
        talk(port, b"")  # It listens now.
        for _ in range(40):
            callers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        began = time.monotonic()
        one = open_store(rank(1, 2, launch), 120.0)
        assert time.monotonic() - began < 5.0, "one after the other they would take 40 s"
        zero.result().set("key", "value")
        assert one.get("key") == b"value"


def test_a_beacon_keeps_no_more_callers_than_it_may_and_none_for_long(monkeypatch):
    monkeypatch.setattr(port_discovery, "_MOST_GUESTS", 4)
    monkeypatch.setattr(port_discovery, "_ANSWER_S", 0.3)
    launch = a_launch()
    words = Words(launch)
    with Beacon(LOOPBACK, words) as ours, contextlib.ExitStack() as callers:
        place = ("127.0.0.1", candidate_ports(launch)[0])
        idle = [callers.enter_context(socket.create_connection(place, timeout=60)) for _ in range(6)]
        while len(ours._guests) < 4:
            ours.answer(1)
        ours.answer(1)
        assert len(ours._guests) == 4
        assert idle[0].recv(1) == b"", "the oldest is dropped"
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            ours.answer(1)
        assert not ours._guests


def test_ports_that_others_hold_all_are_no_end_where_the_attempt_has_a_folder(monkeypatch, tmp_path):
    launch = a_launch()
    taken = candidate_ports(launch)[:2]
    (tmp_path / "logs/attempt-3").mkdir(parents=True)
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "3")
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: taken)
    with listener(taken[0]), listener(taken[1], b"slurmddp-1 other\n"):
        stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"


def test_a_torch_that_takes_no_socket_opens_the_store_itself(monkeypatch):
    monkeypatch.setattr(rendezvous, "_torch_version", lambda: (2, 4))
    launch = a_launch()
    stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_ranks_that_know_the_secret_meet_beside_some_of_the_same_launch_that_do_not(monkeypatch):
    launch = a_launch()
    monkeypatch.setenv("SLURMDDP_SECRET", "5e" * 32)
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(open_store, rank(0, 2, launch), 120.0)
        for secret in ("", "no" * 32):
            answer = talk(candidate_ports(launch)[0], Words(launch, secret).question() + b"\n")
            assert answer == b"slurmddp-1 other\n"
        store = open_store(rank(1, 2, launch), 120.0)
        zero.result().set("key", "value")
        assert store.get("key") == b"value"


def test_the_store_is_reached_on_the_address_that_leads_to_the_others_only():
    launch = a_launch()
    stores = meet([on_two_nodes(n, launch, emulated=False, master_addr="127.0.0.2") for n in range(4)])
    with socket.create_connection(("127.0.0.2", stores[0].port), timeout=60):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stores[0].port), timeout=60)


@pytest.mark.parametrize(("present", "told"), [((0, 1), 0), ((0, 1), 1), ((0,), 0), ((1,), 1)])
def test_a_stop_before_all_have_met_ends_the_wait_of_all(present, told, monkeypatch):
    launch = a_launch()
    reported, report = threading.Event(), rendezvous._report

    def report_and_say(store, info):
        report(store, info)
        if info.rank == told:
            reported.set()

    monkeypatch.setattr(rendezvous, "_report", report_and_say)

    def outcome(number):
        def stopped():
            return number == told and (reported.is_set() or 0 not in present)

        with pytest.raises(StoppedAtCheckpoint) as caught:
            open_store(rank(number, 3, launch), 120.0, stopped=stopped)
        return caught.value.message

    with ThreadPoolExecutor(len(present)) as pool:
        assert all("had met" in message for message in pool.map(outcome, present))


def test_a_stop_after_all_have_met_is_left_to_the_training():
    asked, launch = {0: iter([False, True]), 1: iter([])}, a_launch()
    with ThreadPoolExecutor(2) as pool:
        stopped = [lambda answers=asked[n]: next(answers, False) for n in (0, 1)]
        meeting = [pool.submit(open_store, rank(n, 2, launch), 120.0, stopped=stopped[n]) for n in (1, 0)]
        outcomes = [future.exception() or future.result() for future in meeting]
    # Either all go on or all leave, whoever was first.
    assert len({isinstance(found, StoppedAtCheckpoint) for found in outcomes}) == 1


def test_rank_zero_away_from_its_host_is_refused_at_once():
    info = rank(0, 2, nodes=2, master_addr="203.0.113.9")
    with pytest.raises(MismatchError) as caught:
        open_store(info, 20.0)
    assert "203.0.113.9" in caught.value.message
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint


def test_only_this_machine_can_reach_ranks_of_this_machine():
    launch = a_launch()
    stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert stores[0].port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_the_beacon_is_dark_once_all_have_met():
    launch = a_launch()
    stores = meet([rank(0, 2, launch), rank(1, 2, launch)])
    assert len(stores) == 2
    for port in candidate_ports(launch)[:2]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
