"""Ranks meet at rank 0's store. Each rank is a thread here, because the rendezvous uses sockets only."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from torch.distributed import FileStore

from slurmddp.errors import ConfigError, MismatchError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.host.address import LOOPBACK
from slurmddp.host.ports import candidate_ports
from slurmddp.training.process_group import port_discovery, rendezvous
from slurmddp.training.process_group.participants import Participants
from slurmddp.training.process_group.port_discovery import Handshake, PortServer
from slurmddp.training.process_group.rendezvous import open_store
from support.distributed.meetings import listener, meet, on_two_nodes, rank, talk
from support.runs.launch_ports import a_launch

pytestmark = pytest.mark.distributed


def are_shared(*stores):
    """Return whether a value that each rank sets reaches all ranks."""
    for number, store in enumerate(stores):
        store.set(f"from {number}", str(number))
    ranks = range(len(stores))
    return all({store.get(f"from {rank}") for store in stores} == {str(rank).encode()} for rank in ranks)


def two_ranks(launch):
    return [rank(number, 2, launch) for number in (0, 1)]


def test_four_ranks_share_a_store_that_only_this_machine_can_reach():
    launch = a_launch()
    stores = meet([rank(number, 4, launch) for number in range(4)])
    assert are_shared(*stores)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert stores[0].port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert not {address.port for address in listening} & set(candidate_ports(launch)), "nobody asks any more"


def test_rank_zero_may_be_late():
    launch = a_launch()
    infos = [rank(1, 3, launch), rank(2, 3, launch)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(open_store, info, 120.0) for info in infos]
        first = open_store(rank(0, 3, launch), 120.0)
        assert are_shared(first, *(future.result() for future in waiting))


def test_a_requeue_finds_its_own_rank_zero_while_the_old_one_still_listens(monkeypatch):
    ports, over = candidate_ports(a_launch()), threading.Event()
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: ports)
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(open_store, rank(0, 2, "9.0.0"), 600.0, stopped=over.is_set)
        try:
            talk(ports[0], b"are you there?\n")
            assert are_shared(*meet(two_ranks("9.0.1")))
        finally:
            over.set()
        with pytest.raises(StoppedAtCheckpoint, match="before all ranks had joined"):
            old.result()


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n" * 20,
        b"slurmddp-1 other\n",
        b"slurmddp-1 x\n",
        b"slurmddp-1 1\n",
        b"slurmddp-1 1 %s\n" % (b"0" * 64),
        Handshake("some other launch").response(1) + b"\n",
        None,
    ],
)
def test_t12_ports_of_other_programs_are_skipped(answer, monkeypatch):
    monkeypatch.setattr(rendezvous, "_ANSWER_S", (0.1, 0.1))
    launch = a_launch()
    ports = candidate_ports(launch)
    with listener(ports[0], answer), listener(ports[1], answer):
        assert are_shared(*meet(two_ranks(launch)))


def test_no_free_port_at_all_is_an_error_that_names_the_ports(monkeypatch):
    launch = a_launch()
    taken = candidate_ports(launch)[:2]
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: taken)
    with listener(taken[0]), listener(taken[1]), pytest.raises(SlurmddpError, match=f"{taken[0]} first"):
        open_store(rank(0, 2, launch), 5.0)


def test_a_caller_without_the_token_gets_no_port_and_stops_nothing(monkeypatch):
    launch = a_launch()
    monkeypatch.setenv("SLURMDDP_SECRET", "5e" * 32)
    foreign = Handshake("14.0.0"), Handshake(launch, ""), Handshake(launch, "no" * 32)
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(open_store, rank(0, 2, launch), 120.0)
        for request in (*(one.request() for one in foreign), b"GET / HTTP/1.1\r\n\r", b""):
            assert talk(candidate_ports(launch)[0], request + b"\n") == b"slurmddp-1 other\n"
        one = open_store(rank(1, 2, launch), 120.0)
        assert are_shared(zero.result(), one)


def test_silent_callers_delay_no_rank(monkeypatch):
    # Callers that were served one after the other would take hours.
    monkeypatch.setattr(port_discovery, "_ANSWER_S", 3600.0)
    launch = a_launch()
    port = candidate_ports(launch)[0]
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as callers:
        zero = pool.submit(open_store, rank(0, 2, launch), 120.0)
        talk(port, b"")  # Returns once rank 0 listens.
        for _ in range(40):
            callers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        one = open_store(rank(1, 2, launch), 120.0)
        assert are_shared(zero.result(), one)


def test_the_port_server_limits_the_number_and_the_time_of_its_callers(monkeypatch):
    monkeypatch.setattr(port_discovery, "_MAX_CALLERS", 4)
    monkeypatch.setattr(port_discovery, "_ANSWER_S", 3600.0)
    launch = a_launch()
    with PortServer(LOOPBACK, Handshake(launch)) as server, contextlib.ExitStack() as callers:
        address = ("127.0.0.1", candidate_ports(launch)[0])
        idle = [callers.enter_context(socket.create_connection(address, timeout=60)) for _ in range(6)]
        while len(server._callers) < 4:
            server.answer(1)
        server.answer(1)
        assert len(server._callers) == 4
        assert idle[0].recv(1) == b"", "the oldest is dropped"
        monkeypatch.setattr(port_discovery, "_ANSWER_S", -1.0)
        server.answer(1)
        assert not server._callers


def test_without_a_free_candidate_the_port_is_published_in_the_attempts_folder(monkeypatch, tmp_path):
    launch = a_launch()
    taken = candidate_ports(launch)[:2]
    (tmp_path / "logs/attempt-3").mkdir(parents=True)
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "3")
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda launch_id: taken)
    with listener(taken[0]), listener(taken[1], b"slurmddp-1 other\n"):
        assert are_shared(*meet(two_ranks(launch)))


def test_the_store_listens_only_on_the_address_that_leads_to_the_others():
    launch = a_launch()
    stores = meet([on_two_nodes(n, launch, emulated=False, master_addr="127.0.0.2") for n in range(4)])
    with socket.create_connection(("127.0.0.2", stores[0].port), timeout=60):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stores[0].port), timeout=60)


@pytest.mark.parametrize(("present", "signalled"), [((0, 1), 0), ((0, 1), 1), ((0,), 0), ((1,), 1)])
def test_a_stop_before_all_ranks_have_joined_ends_the_wait_of_all(present, signalled, monkeypatch):
    launch = a_launch()
    joined, join = threading.Event(), Participants.join

    def join_and_note(self):
        join(self)
        if self._info.rank == signalled:
            joined.set()

    monkeypatch.setattr(Participants, "join", join_and_note)

    def outcome(number):
        def stopped():
            return number == signalled and (joined.is_set() or 0 not in present)

        with pytest.raises(StoppedAtCheckpoint) as caught:
            open_store(rank(number, 3, launch), 120.0, stopped=stopped)
        return caught.value.message

    with ThreadPoolExecutor(len(present)) as pool:
        assert all("had joined" in message for message in pool.map(outcome, present))


def test_a_stop_as_the_last_rank_joins_stops_all_ranks_or_none():
    asked, launch = {0: iter([False, True]), 1: iter([])}, a_launch()
    with ThreadPoolExecutor(2) as pool:
        stopped = [lambda answers=asked[n]: next(answers, False) for n in (0, 1)]
        meeting = [pool.submit(open_store, rank(n, 2, launch), 120.0, stopped=stopped[n]) for n in (1, 0)]
        outcomes = [future.exception() or future.result() for future in meeting]
    assert len({isinstance(found, StoppedAtCheckpoint) for found in outcomes}) == 1


def test_a_rank_zero_on_another_host_is_refused_at_once():
    info = rank(0, 2, nodes=2, master_addr="203.0.113.9")
    with pytest.raises(MismatchError) as caught:
        open_store(info, 20.0)
    assert "203.0.113.9" in caught.value.message
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint


def test_a_file_that_is_no_whole_store_is_refused_at_once(tmp_path):
    """torch would read it without end, whatever the time-out."""
    file = tmp_path / "store"
    FileStore(str(file), -1).set("key", "value")
    whole, key = file.read_bytes(), b"\1" + bytes(3) + b"k"
    for damaged in (whole[:-3], whole + key, whole + b"text", b"x" * 300):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"store \(init_method\) is not a complete FileStore") as caught:
            open_store(rank(1, 2), 0.1, f"file://{file}")
        assert "Delete the file" in caught.value.hint
    file.write_bytes(whole)
    with pytest.raises(SlurmddpError, match="Rank 0 has not started with rank 1"):
        open_store(rank(1, 2), 0.1, f"file://{file}")
