"""Ranks that do not join: every waiting rank names them, in time."""

import dataclasses
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from slurmddp.errors import MismatchError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.host.ports import candidate_ports
from slurmddp.training.process_group import rendezvous
from slurmddp.training.process_group.participants import Participants
from slurmddp.training.process_group.port_discovery import Handshake
from slurmddp.training.process_group.rendezvous import open_store
from support.distributed.meetings import WHO, listener, meet, on_two_nodes, rank
from support.runs.launch_ports import a_launch

pytestmark = pytest.mark.distributed


@pytest.fixture
def patience(monkeypatch):
    """Let the time of one rank run out once a condition is true, however slow the machine is."""

    def until(condition, number=0):
        def now():
            return time.monotonic() + 3600 * (getattr(WHO, "rank", None) == number and condition())

        monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
        monkeypatch.setattr(rendezvous, "_READ_S", 120.0)

    return until


@pytest.fixture
def joins(monkeypatch):
    """Collect the ranks that have joined, or tried to."""
    seen, join = [], Participants.join

    def join_and_note(self):
        try:
            join(self)
        finally:
            seen.append(self._info.rank)

    monkeypatch.setattr(Participants, "join", join_and_note)
    return seen


def uneven(number):
    """Return one of four ranks, of which three are on the first node."""
    node, local = divmod(number, 3)
    facts = {"node_rank": node, "local_rank": local, "local_world_size": 3 - 2 * node, "tasks": (3, 1)}
    return on_two_nodes(number, "", **facts)


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ([rank(0, 4), rank(2, 4)], "2 of 4 ranks did not report to rank 0 on {host}: rank 1, 3."),
        ([on_two_nodes(0, ""), on_two_nodes(3, "")], "rank 1 on n1 and rank 2 on n2."),
        ([uneven(0), uneven(1), uneven(3)], ": rank 2 on n1."),
        ([on_two_nodes(number, "", node_rank=number % 2) for number in range(3)], ": rank 3."),
    ],
    ids=["one node", "two nodes", "nodes of unequal size", "ranks dealt in turn: without hosts"],
)
def test_all_waiting_ranks_name_the_missing_ranks(patience, joins, present, named):
    launch = a_launch()
    patience(lambda: len(joins) == len(present))
    for error in meet([dataclasses.replace(info, launch_id=launch) for info in present]):
        assert isinstance(error, SlurmddpError) and error.exit_code == 1
        assert error.message.endswith(named.format(host=socket.gethostname()))


def test_rank_zero_leaves_after_a_slow_rank_has_read_why(monkeypatch, patience, joins):
    """Rank 0 holds the store: without it the other rank could only say that rank 0 is gone."""
    launch, decided, read = a_launch(), threading.Event(), threading.Event()
    decide, outcome = Participants.decide, Participants.outcome

    def decide_and_note(self, text):
        found = decide(self, text)
        decided.set()
        return found

    def outcome_late(self):
        if self._info.rank:
            assert decided.wait(120)
            time.sleep(1.0)
            read.set()
        return outcome(self)

    monkeypatch.setattr(Participants, "decide", decide_and_note)
    monkeypatch.setattr(Participants, "outcome", outcome_late)
    patience(lambda: len(joins) == 2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, [rank(2, 3, launch)])
        (error,) = meet([rank(0, 3, launch)])
        assert read.is_set()
        assert [one.message for one in other.result()] == [error.message]


def test_rank_zero_logs_the_missing_ranks_while_it_waits(monkeypatch, caplog, patience):
    monkeypatch.setattr(rendezvous, "_NOTICE_S", (0.1, 0.1))
    launch = a_launch()
    patience(lambda: "1 of 3 ranks" in caplog.text)
    errors = meet([rank(0, 3, launch), rank(2, 3, launch)])
    assert all("rank 1." in error.message for error in errors)
    said = [record.message for record in caplog.records if "1 of 3 ranks" in record.message]
    assert said and all("rank 1." in text for text in said)


def test_ports_that_never_answer_do_not_delay_the_log(monkeypatch, caplog):
    asked, now = [], itertools.count(100.0, 0.5)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=now.__next__, sleep=time.sleep))
    monkeypatch.setattr(rendezvous, "ask_for_port", lambda *place: asked.append(place))
    with pytest.raises(StoppedAtCheckpoint):
        open_store(
            on_two_nodes(2, a_launch()), 3600, stopped=lambda: "rank 0 on n1 does not answer" in caplog.text
        )
    assert len(asked) < len(candidate_ports("any"))


def test_a_waiting_rank_logs_after_three_seconds_and_then_every_ten():
    now = itertools.count(100.0, 0.5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rendezvous, "time", SimpleNamespace(monotonic=now.__next__))
        notice = rendezvous._Notice()
        said = [0.5 * (step + 1) for step in range(50) if notice.is_due()]
    assert said[0] <= 4.0
    assert len(said) == 3


def test_without_rank_zero_the_error_names_the_address_and_the_ports():
    launch = a_launch()
    with pytest.raises(SlurmddpError) as caught:
        open_store(rank(1, 2, launch), 0.3)
    assert launch in caught.value.message
    assert "127.0.0.1" in caught.value.message
    assert str(candidate_ports(launch)[0]) in caught.value.message
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint


def test_a_slow_name_server_is_named_with_the_missing_ranks(monkeypatch, caplog, patience, joins):
    tcp_store = dist.TCPStore

    def slow(*place, **options):
        time.sleep(0.2)
        return tcp_store(*place, **options)

    monkeypatch.setattr(rendezvous, "_SLOW_S", 0.1)
    patience(lambda: len(joins) == 2)
    monkeypatch.setattr(rendezvous.dist, "TCPStore", slow)
    launch = a_launch()
    zero, one = meet([rank(0, 3, launch), rank(1, 3, launch)])
    assert zero.message.endswith(": rank 2.")
    assert "name server" in zero.hint
    assert isinstance(one, SlurmddpError)
    assert sum("torch took" in record.getMessage() for record in caplog.records) == 2


def test_two_processes_with_one_rank_are_refused(patience, joins):
    launch = a_launch()
    patience(lambda: len(joins) == 3)
    outcomes = meet([rank(0, 3, launch), rank(1, 3, launch), rank(1, 3, launch)])
    assert any(isinstance(found, MismatchError) and "rank 1" in found.message for found in outcomes)
    assert all(isinstance(found, SlurmddpError) for found in outcomes)


def test_a_store_that_does_not_answer_costs_no_more_than_the_given_time(monkeypatch, patience):
    answers, ask, launch = [], rendezvous.ask_for_port, a_launch()

    def ask_and_note(*arguments):
        answers.append(ask(*arguments))
        return answers[-1]

    monkeypatch.setattr(rendezvous, "ask_for_port", ask_and_note)
    patience(lambda: any(answers), number=1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # No program listens.
        dead = closed.getsockname()[1]
        with listener(candidate_ports(launch)[0], Handshake(launch).response(dead) + b"\n"):
            (error,) = meet([rank(1, 2, launch)])
    assert isinstance(error, SlurmddpError) and f"port {dead}" in error.message
