"""Nodes that are lost before the ranks begin, and nodes that have none: what node 0's agent makes of it."""

from __future__ import annotations

import pytest

from slurmddp.launchers.coordinator.messages import (
    Fail,
    KillWorkers,
    Leave,
    Lost,
    StartWorkers,
    WorkersDone,
    WorkersFailed,
    WorkersKilled,
)
from slurmddp.runs.failures.failure import describe
from support.runs.coordinator_attempts import Attempt, failed, to_all


def join(attempt: Attempt, now: float, *missing: int) -> list[tuple[int, str]]:
    attempt.coordinator.poll(now, missing=missing)
    return attempt.taken_orders()


def test_a_node_that_is_lost_before_the_ranks_begin_is_not_waited_for() -> None:
    attempt = Attempt()
    assert join(attempt, 0.1, 1) == []
    attempt.orders(2, Lost, why="connection closed")
    assert join(attempt, 0.2, 1) == to_all(Fail, 0)
    assert attempt.notes.done == [("failed", 2, None)]
    assert "connection closed" in attempt.notes.lines[-1]


def test_a_spare_takes_the_place_of_a_node_that_is_lost_before_the_ranks_begin() -> None:
    attempt = Attempt(spare_nodes=1)
    join(attempt, 0.1, 1)
    attempt.orders(2, Lost, why="connection closed")
    assert join(attempt, 0.2, 1) == [], "node 1 may still come"
    attempt.coordinator.poll(0.3)
    assert attempt.coordinator.orders[0][1].agents == (0, 1, 3)
    assert attempt.taken_orders() == to_all(StartWorkers, 0, 1, 3)
    assert attempt.notes.done == [("without", {2})]


def test_with_elastic_the_others_begin_without_a_node_that_is_lost() -> None:
    attempt = Attempt(elastic=True)
    join(attempt, 0.1, 1)
    attempt.orders(2, Lost, why="connection closed")
    assert join(attempt, 0.2, 1) == []
    assert join(attempt, 0.3) == to_all(StartWorkers, 0, 1)


def test_it_is_told_without_whom_the_ranks_begin() -> None:
    attempt = Attempt(elastic=True, join_timeout_s=20.0)
    attempt.orders(1, Lost, why="connection closed")
    join(attempt, 20.1, 2)
    assert attempt.notes.lines[-1] == "the ranks begin without node 1 (n1), node 2 (n2)"


@pytest.mark.parametrize("late", [False, True], ids=["a lost one", "one that did not come"])
def test_ranks_that_refuse_to_begin_on_fewer_nodes_end_the_attempt_as_the_missing_one_would_have(
    late: bool,
) -> None:
    attempt = Attempt(elastic=True, join_timeout_s=20.0)
    if late:
        assert join(attempt, 20.1, 2) == to_all(StartWorkers, 0, 1)
    else:
        attempt.orders(2, Lost, why="connection closed")
        assert join(attempt, 0.1) == to_all(StartWorkers, 0, 1)
    refused = failed(1, rank=1, code=78)
    assert attempt.send(1, WorkersFailed, 22.0, step=-1, failures=(refused,)) == [Fail(code=1)] * 2
    assert attempt.notes.done[-1] == ("failed", 2, None)


def test_a_lost_node_is_not_named_among_those_that_are_waited_for() -> None:
    attempt = Attempt(elastic=True)
    attempt.orders(2, Lost, why="connection closed")
    join(attempt, 3.1, 1)
    assert attempt.notes.lines[-1].startswith("waiting for node 1 (n1); 1 of 3 nodes have joined")


def test_a_spare_takes_the_place_of_a_node_whose_agent_can_not_go_on() -> None:
    attempt = Attempt(spare_nodes=1)
    join(attempt, 0.1, 1)
    assert attempt.unable(1, code=78) == []
    attempt.coordinator.poll(0.2)
    assert attempt.coordinator.orders[0][1].agents == (0, 3, 2)
    assert attempt.taken_orders() == to_all(StartWorkers, 0, 2, 3)
    assert attempt.notes.done == [("without", {1})]
    assert "agent of node 1" in attempt.notes.lines[0]


def test_what_one_agent_refuses_as_the_ranks_begin_is_tried_without_it() -> None:
    attempt = Attempt(elastic=True).begin()
    assert attempt.unable(1, code=78) == to_all(KillWorkers, 0, 2)
    attempt.killed(0)
    assert attempt.killed(2) == to_all(StartWorkers, 0, 2)


def test_a_spare_that_can_not_go_on_is_only_told_of() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert attempt.unable(3) == []
    assert "agent of node 3" in attempt.notes.lines[-1]
    assert attempt.notes.done == [("without", {3})]
    assert attempt.orders(1, Lost, why="connection closed") == to_all(Fail, 0, 2), "it is no spare any more"


def test_who_is_idle_is_not_among_those_that_are_gone() -> None:
    """Two of three nodes can't share this step."""
    attempt = Attempt(elastic=True, samples=9).begin()
    attempt.orders(1, Lost, why="connection closed")
    attempt.killed(0)
    assert attempt.killed(2) == to_all(StartWorkers, 0, 2)
    assert ("without", {1}) in attempt.notes.done


def test_a_node_that_is_lost_once_its_ranks_have_finished_is_not_missed() -> None:
    attempt = Attempt().begin()
    attempt.orders(1, WorkersDone, code=0)
    assert attempt.orders(1, Lost, why="connection closed") == []
    attempt.orders(2, WorkersDone, code=0)
    assert attempt.orders(0, WorkersDone, code=0) == to_all(Leave, 0, 2)


def test_it_is_told_for_how_long_no_rank_on_any_node_had_completed_a_step() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    attempt.orders(2, Lost, 20.0, why="no heartbeat for 10 s")
    attempt.orders(1, WorkersKilled, now=20.5, silent_s=11.5, failures=())
    attempt.orders(0, WorkersKilled, now=21.0, silent_s=11.0, failures=())
    assert attempt.notes.silent_s == 11.0


SILENT = {"why": "no heartbeat for 10 s"}


def test_a_first_node_that_loses_all_others_at_once_names_itself() -> None:
    attempt = Attempt().begin()
    attempt.orders(2, Lost, **SILENT, together=2)
    assert attempt.notes.done == [("failed", 0, None)]
    (cause,) = attempt.notes.causes
    assert cause.host == "n0"
    assert cause.sentence == (
        "node 0 (n0) was lost: it lost all 2 other nodes at once, so its own network is the likely cause "
        "(no heartbeat for 10 s)"
    )
    assert not any("node 2 (n2) is lost" in line for line in attempt.notes.lines)


@pytest.mark.parametrize("changes", [{"nodes": 2}, {"nodes": 3}], ids=["two nodes", "the last two of three"])
def test_two_nodes_that_lose_each_other_are_both_named(changes: dict[str, int]) -> None:
    attempt = Attempt(**changes).begin()
    attempt.orders(1, Lost, **SILENT, together=1)
    assert attempt.notes.done == [("failed", None, None)]
    (cause,) = attempt.notes.causes
    assert cause.host == "n0, n1"
    assert describe(cause) == (
        "Nodes n0 and n1 lost contact with each other: no heartbeat for 10 s. The host or the network of "
        "one of these nodes went down; batch.log and excluded.jsonl may name the node."
    )


def test_which_nodes_go_on_does_not_depend_on_the_node_that_is_named() -> None:
    attempt = Attempt(elastic=True).begin()
    assert attempt.orders(1, Lost, **SILENT, together=2) == to_all(KillWorkers, 0, 2)
    assert attempt.orders(2, Lost, **SILENT, together=2) == []
    assert attempt.killed(0) == to_all(StartWorkers, 0)
    assert attempt.notes.done[-1] == ("without", {1, 2})
    assert {(cause.node_rank, cause.host) for cause in attempt.notes.causes} == {(0, "n0")}


def test_a_node_that_falls_silent_while_others_speak_is_named() -> None:
    attempt = Attempt().begin()
    attempt.orders(2, Lost, **SILENT, together=0)
    assert attempt.notes.done == [("failed", 2, None)]


def test_without_a_node_its_part_of_a_sharded_state_is_missing() -> None:
    attempt = Attempt().begin()
    assert attempt.coordinator.has_all_nodes
    attempt.orders(1, Lost, why="connection closed")
    assert not attempt.coordinator.has_all_nodes
