"""Nodes that the preflight has found unfit: what node 0's agent makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from lead_attempts import LOST_PEER, Attempt, fallen, to_all

from slurmddp.launchers.coordinator.messages import as_facts
from slurmddp.launchers.coordinator.restart_policy import Generation

WHY = "/proc (TMPDIR) can't be written to."


def refuse(attempt: Attempt, sender: int, generation: int = 0, code: int = 76, now: float = 1.0) -> list[Any]:
    """Tell that the rank of an agent has left after the preflight, before its first step."""
    rank = attempt.lead._generation.agents.index(sender)
    facts = as_facts(fallen(sender, rank=rank, code=code))
    return attempt.hear(sender, "fell", now, generation=generation, step=-1, failures=[facts])


def end_ranks(attempt: Attempt, *agents: int, generation: int = 0) -> None:
    """Let agents end their ranks; what is ordered after the last of them is for `go_of`."""
    for agent in agents:
        message = {"kind": "stopped", "generation": generation, "step": -1, "failures": []}
        attempt.lead.take(agent, message, 2.0)


def go_of(attempt: Attempt) -> dict[str, Any]:
    """Return the newest order to begin, with whom it went to; nothing else was ordered."""
    found = {to: message for to, message in attempt.lead.orders}
    attempt.lead.orders.clear()
    (message,) = {id(one): one for one in found.values()}.values()
    return {**message, "to": set(found)}


def with_unfit(*unfit: int, **rules: Any) -> Attempt:
    attempt = Attempt(**rules).begin()
    attempt.notes.verdicts[0] = dict.fromkeys(unfit, WHY)
    return attempt


def test_a_spare_takes_the_place_of_an_unfit_node_and_all_are_looked_at_again() -> None:
    attempt = Attempt(spare_nodes=1)
    attempt.lead.look(0.1)
    assert go_of(attempt)["look"]
    attempt.notes.verdicts[0] = {1: WHY}
    assert refuse(attempt, 2) == to_all("stop")
    end_ranks(attempt, 0, 2)
    assert attempt.ordered() == []
    end_ranks(attempt, 1)
    order = go_of(attempt)
    assert (order["kind"], order["agents"], order["look"], order["unfit"]) == ("go", [0, 3, 2], True, [1])
    assert order["to"] == {0, 1, 2, 3}, "the unfit one waits for the end like all others"
    assert attempt.notes.done == [("fell", 0, None), ("restarted", Generation(1, (0, 3, 2)), -1)]
    assert attempt.notes.said == [f"node 1 (n1) is not fit: {WHY}"]


def test_what_is_told_of_it_names_the_node_and_what_was_found() -> None:
    attempt = with_unfit(1, spare_nodes=1)
    told: list[Any] = []
    attempt.notes.restarted = lambda after, before, cause, *rest: told.append(cause)  # type: ignore[method-assign]
    refuse(attempt, 0)
    end_ranks(attempt, 0, 1, 2)
    (cause,) = told
    assert (cause.node_rank, cause.rank, cause.host) == (1, None, "n1")
    assert cause.sentence == f"node 1 (n1) was lost to the preflight: {WHY.removesuffix('.')}"
    assert "rank-0.log" in cause.advice


def test_each_unfit_node_takes_a_spare_until_none_is_left() -> None:
    attempt = with_unfit(1, spare_nodes=2)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    assert go_of(attempt)["agents"] == [0, 3, 2]
    attempt.notes.verdicts[1] = {3: WHY}
    refuse(attempt, 3, generation=1)
    end_ranks(attempt, 0, 3, 2, generation=1)
    order = go_of(attempt)
    assert (order["agents"], order["look"], order["unfit"]) == ([0, 4, 2], True, [1, 3])
    attempt.notes.verdicts[2] = {2: WHY}
    attempt.lead.take(
        2, {"kind": "fell", "generation": 2, "step": -1, "failures": [as_facts(fallen(2, code=76))]}, 9.0
    )
    assert [message for _, message in attempt.lead.orders] == [{"kind": "end", "code": 76}] * 5
    assert attempt.notes.done[-1] == ("failed", 2, 0), "as without spares: the batch script gets others"
    assert "no other node can take the place" in attempt.notes.said[-1]


def test_after_a_step_ranks_that_begin_again_do_not_look() -> None:
    attempt = with_unfit(1, spare_nodes=2)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    go_of(attempt)
    failures = [as_facts(fallen(2))]
    attempt.hear(2, "fell", generation=1, step=4, failures=failures)
    end_ranks(attempt, 0, 3, 2, generation=1)
    order = go_of(attempt)
    assert (order["agents"], order["look"]) == ([0, 3, 2], False)


def test_a_node_that_is_lost_during_the_preflight_lets_all_look_again() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    attempt.hear(1, "lost", step=-1, why="connection closed")
    end_ranks(attempt, 0, 2)
    order = go_of(attempt)
    assert (order["agents"], order["look"], order["unfit"]) == ([0, 3, 2], True, [])


def test_with_elastic_the_others_go_on_without_an_unfit_node() -> None:
    attempt = with_unfit(1, elastic=True)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    order = go_of(attempt)
    assert (order["agents"], order["look"], order["to"]) == ([0, 2], True, {0, 1, 2})


def test_fewer_nodes_that_ranks_refuse_end_the_attempt_with_76() -> None:
    attempt = with_unfit(1, elastic=True)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    go_of(attempt)
    refused = as_facts(fallen(2, rank=1, code=78))
    attempt.lead.take(2, {"kind": "fell", "generation": 1, "step": -1, "failures": [refused]}, 2.0)
    assert [message for _, message in attempt.lead.orders] == [{"kind": "end", "code": 76}] * 3


@pytest.mark.parametrize(
    ("unfit", "rules"),
    [
        ((1,), {}),
        ((0,), {"spare_nodes": 1}),
        ((0,), {"elastic": True}),
        ((1,), {"spare_nodes": 1, "max_restarts": 0}),
    ],
    ids=["no spare", "the first node", "the first node, elastic", "no restarts in place"],
)
def test_otherwise_the_attempt_ends_and_the_next_gets_other_nodes(
    unfit: tuple[int, ...], rules: dict[str, Any]
) -> None:
    attempt = with_unfit(*unfit, **rules)
    assert refuse(attempt, 0) == to_all("end", *range(3 + rules.get("spare_nodes", 0)))
    assert attempt.notes.done[-1] == ("failed", 0, 0)


def test_a_stop_is_a_stop_also_where_a_node_is_unfit() -> None:
    attempt = with_unfit(1, spare_nodes=1)
    attempt.notes.over = True
    assert refuse(attempt, 0) == to_all("end", 0, 1, 2, 3)


def test_a_wrong_configuration_is_not_tried_again_on_a_spare() -> None:
    attempt = with_unfit(1, spare_nodes=1)
    assert refuse(attempt, 0, code=78) == to_all("end", 0, 1, 2, 3)


@pytest.mark.parametrize(("code", "lines"), [(1, ()), (1, LOST_PEER)], ids=["a failure", "a lost peer"])
def test_where_no_node_can_be_avoided_later_a_spare_takes_its_place_all_the_same(
    code: int, lines: tuple[str, ...]
) -> None:
    """On pretended nodes, or with policy.exclude_failed_h=0, ranks leave the preflight with 1."""
    attempt = with_unfit(1, spare_nodes=1)
    facts = as_facts(fallen(0, rank=0, code=code, lines=lines))
    assert attempt.hear(0, "fell", step=-1, failures=[facts]) == to_all("stop")


def test_the_verdict_of_rank_0_is_waited_for() -> None:
    """Where ranks find when they meet that a node has no GPU, each leaves by itself; rank 0 writes it."""
    attempt = Attempt(spare_nodes=1).begin()
    assert refuse(attempt, 1, now=1.0) == []
    attempt.notes.verdicts[0] = {1: WHY}
    assert refuse(attempt, 0, now=1.5) == to_all("stop")


def test_a_verdict_that_does_not_come_is_not_waited_for_long() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    refuse(attempt, 1, now=1.0)
    assert attempt.lead.next_look == pytest.approx(4.0)
    attempt.lead.look(4.1)
    assert attempt.ordered() == to_all("end", 0, 1, 2, 3)
    assert attempt.notes.done == [("failed", 1, 1)]


def test_76_without_a_verdict_ends_the_attempt() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert refuse(attempt, 0) == to_all("end", 0, 1, 2, 3)


def test_a_job_that_needs_all_its_nodes_waits_for_no_verdict() -> None:
    attempt = with_unfit(1)
    assert refuse(attempt, 1) == to_all("end")
    assert attempt.notes.said[-1].endswith("The attempt ends: a rank refused to go on.")


def test_a_verdict_that_comes_while_all_ranks_are_ended_counts_as_well() -> None:
    """A node is lost during the preflight, which finds another one unfit."""
    attempt = Attempt(spare_nodes=2).begin()
    assert attempt.hear(2, "lost", step=-1, why="connection closed") == to_all("stop", 0, 1)
    attempt.notes.verdicts[0] = {1: WHY}
    left = [as_facts(fallen(0, rank=0, code=76))]
    attempt.hear(0, "stopped", step=-1, failures=left)
    end_ranks(attempt, 1)
    assert go_of(attempt)["agents"] == [0, 3, 4]


def test_an_unfit_node_that_is_lost_later_is_not_missed() -> None:
    attempt = with_unfit(1, spare_nodes=1)
    refuse(attempt, 1)
    end_ranks(attempt, 0, 1, 2)
    go_of(attempt)
    assert attempt.hear(1, "lost", generation=1, why="connection closed") == []
    assert attempt.notes.done[-1] == ("without", {1})
