"""Nodes that the preflight has found unfit: what node 0's agent makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from slurmddp.launchers.coordinator.messages import (
    Fail,
    KillWorkers,
    Lost,
    StartWorkers,
    WorkersFailed,
    WorkersKilled,
)
from slurmddp.launchers.coordinator.restart_policy import Assignment
from support.runs.coordinator_attempts import LOST_PEER, Attempt, failed, to_all

WHY = "/proc (TMPDIR) can't be written to."


def refuse(
    attempt: Attempt, sender: int, restart_count: int = 0, code: int = 76, lines: tuple[str, ...] = ()
) -> list[Any]:
    """Report that the rank of an agent has exited after the preflight, before its first step."""
    rank = attempt.coordinator._group.assignment.agents.index(sender)
    found = failed(sender, rank=rank, code=code, lines=lines)
    facts = {"restart_count": restart_count, "step": -1, "unhealthy": found_by(attempt)}
    return attempt.orders(sender, WorkersFailed, failures=(found,), **facts)


def found_by(attempt: Attempt) -> dict[int, str]:
    """Return the unhealthy nodes as the ranks report them: by node rank."""
    agents = attempt.coordinator._group.assignment.agents
    return {agents.index(agent): WHY for agent in attempt.unhealthy}


def end_ranks(attempt: Attempt, *agents: int, restart_count: int = 0) -> None:
    """Let agents end their ranks; what is ordered after the last of them is for `start_of`."""
    for agent in agents:
        message = WorkersKilled(restart_count=restart_count)
        attempt.coordinator.receive(agent, message, 2.0)


def start_of(attempt: Attempt) -> tuple[StartWorkers, set[int]]:
    """Return the order to start, and the agents that it went to; the coordinator has ordered nothing else."""
    found = dict(attempt.coordinator.orders)
    attempt.taken_orders()
    (order,) = {id(one): one for one in found.values()}.values()
    assert isinstance(order, StartWorkers)
    return order, set(found)


def with_unhealthy(*unhealthy: int, **rules: Any) -> Attempt:
    attempt = Attempt(**rules).begin()
    attempt.unhealthy = unhealthy
    return attempt


def test_a_spare_takes_the_place_of_an_unfit_node_and_all_are_looked_at_again() -> None:
    attempt = Attempt(spare_nodes=1)
    attempt.coordinator.poll(0.1)
    assert start_of(attempt)[0].preflight
    attempt.unhealthy = (1,)
    assert refuse(attempt, 2) == to_all(KillWorkers)
    end_ranks(attempt, 0, 2)
    assert attempt.taken_orders() == []
    end_ranks(attempt, 1)
    order, to = start_of(attempt)
    assert (order.agents, order.preflight, order.excluded) == ((0, 3, 2), True, (1,))
    assert to == {0, 1, 2, 3}, "the unfit one waits for the end like all others"
    assert attempt.notes.done == [("group_failed", 0, None), ("restarted", Assignment(1, (0, 3, 2)), -1)]
    assert attempt.notes.lines == [f"node 1 (n1) did not pass the preflight: {WHY}"]


def test_what_is_told_of_it_names_the_node_and_what_was_found() -> None:
    attempt = with_unhealthy(1, spare_nodes=1)
    told: list[Any] = []
    attempt.notes.restarted = lambda after, before, cause, *rest: told.append(cause)  # type: ignore[method-assign]
    refuse(attempt, 0)
    end_ranks(attempt, 0, 1, 2)
    attempt.taken_orders()
    (cause,) = told
    assert (cause.node_rank, cause.rank, cause.host) == (1, None, "n1")
    assert cause.sentence == f"node 1 (n1) failed the preflight: {WHY.removesuffix('.')}"
    assert "rank-0.log" in cause.advice


def test_each_unfit_node_takes_a_spare_until_none_is_left() -> None:
    attempt = with_unhealthy(1, spare_nodes=2)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    assert start_of(attempt)[0].agents == (0, 3, 2)
    attempt.unhealthy = (3,)
    refuse(attempt, 3, restart_count=1)
    end_ranks(attempt, 0, 3, 2, restart_count=1)
    order, _ = start_of(attempt)
    assert (order.agents, order.preflight, order.excluded) == ((0, 4, 2), True, (1, 3))
    attempt.unhealthy = (2,)
    facts = {"restart_count": 2, "step": -1, "unhealthy": found_by(attempt)}
    assert attempt.send(2, WorkersFailed, failures=(failed(2, code=76),), **facts) == [Fail(code=76)] * 5
    assert attempt.notes.done[-1] == ("failed", 2, 0), "as without spares: the batch script gets others"
    assert "no other node can take the place" in attempt.notes.lines[-1]


def test_after_a_step_ranks_that_begin_again_do_not_look() -> None:
    attempt = with_unhealthy(1, spare_nodes=2)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    start_of(attempt)
    failures = [failed(2)]
    attempt.orders(2, WorkersFailed, restart_count=1, step=4, failures=failures)
    end_ranks(attempt, 0, 3, 2, restart_count=1)
    order, _ = start_of(attempt)
    assert (order.agents, order.preflight) == ((0, 3, 2), False)


def test_a_node_that_is_lost_during_the_preflight_lets_all_look_again() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    attempt.orders(1, Lost, why="connection closed")
    end_ranks(attempt, 0, 2)
    order, _ = start_of(attempt)
    assert (order.agents, order.preflight, order.excluded) == ((0, 3, 2), True, ())


def test_with_elastic_the_others_go_on_without_an_unfit_node() -> None:
    attempt = with_unhealthy(1, elastic=True)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    order, to = start_of(attempt)
    assert (order.agents, order.preflight, to) == ((0, 2), True, {0, 1, 2})


def test_fewer_nodes_that_ranks_refuse_end_the_attempt_with_76() -> None:
    attempt = with_unhealthy(1, elastic=True)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    start_of(attempt)
    refused = failed(2, rank=1, code=78)
    facts = {"restart_count": 1, "step": -1, "failures": (refused,)}
    assert attempt.send(2, WorkersFailed, **facts) == [Fail(code=76)] * 3


@pytest.mark.parametrize(
    ("unhealthy", "rules"),
    [
        ((1,), {}),
        ((0,), {"spare_nodes": 1}),
        ((0,), {"elastic": True}),
        ((1,), {"spare_nodes": 1, "max_restarts": 0}),
    ],
    ids=["no spare", "the first node", "the first node, elastic", "no restarts in place"],
)
def test_otherwise_the_attempt_ends_and_the_next_gets_other_nodes(
    unhealthy: tuple[int, ...], rules: dict[str, Any]
) -> None:
    attempt = with_unhealthy(*unhealthy, **rules)
    assert refuse(attempt, 0) == to_all(Fail, *range(3 + rules.get("spare_nodes", 0)))
    assert attempt.notes.done[-1] == ("failed", 0, 0)


def test_a_stop_is_a_stop_also_where_a_node_is_unfit() -> None:
    attempt = with_unhealthy(1, spare_nodes=1)
    attempt.notes.over = True
    assert refuse(attempt, 0) == to_all(Fail, 0, 1, 2, 3)


def test_a_wrong_configuration_is_not_tried_again_on_a_spare() -> None:
    attempt = with_unhealthy(1, spare_nodes=1)
    assert refuse(attempt, 0, code=78) == to_all(Fail, 0, 1, 2, 3)


@pytest.mark.parametrize(("code", "lines"), [(1, ()), (1, LOST_PEER)], ids=["a failure", "a lost peer"])
def test_where_no_node_can_be_avoided_later_a_spare_takes_its_place_all_the_same(
    code: int, lines: tuple[str, ...]
) -> None:
    """On pretended nodes, or with policy.exclude_failed_h=0, ranks leave the preflight with 1."""
    attempt = with_unhealthy(1, spare_nodes=1)
    assert refuse(attempt, 0, code=code, lines=lines) == to_all(KillWorkers)


def test_76_without_a_verdict_ends_the_attempt() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert refuse(attempt, 0) == to_all(Fail, 0, 1, 2, 3)


def test_a_job_that_needs_all_its_nodes_ends() -> None:
    attempt = with_unhealthy(1)
    assert refuse(attempt, 1) == to_all(Fail)
    assert attempt.notes.lines[-1].endswith("rules out a restart.")


def test_a_verdict_that_comes_while_all_ranks_are_ended_counts_as_well() -> None:
    """A node is lost during the preflight, which finds another one unfit."""
    attempt = Attempt(spare_nodes=2).begin()
    assert attempt.orders(2, Lost, why="connection closed") == to_all(KillWorkers, 0, 1)
    attempt.unhealthy = (1,)
    left = [failed(0, rank=0, code=76)]
    attempt.orders(0, WorkersKilled, step=-1, failures=left, unhealthy=found_by(attempt))
    end_ranks(attempt, 1)
    assert start_of(attempt)[0].agents == (0, 3, 4)


def test_an_unfit_node_that_is_lost_later_is_not_missed() -> None:
    attempt = with_unhealthy(1, spare_nodes=1)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    start_of(attempt)
    assert attempt.orders(1, Lost, why="connection closed") == []
    assert attempt.notes.done[-1] == ("without", {1})
