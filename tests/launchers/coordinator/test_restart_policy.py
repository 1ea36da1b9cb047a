"""The agents that run ranks, and whether ranks restart in place: every rule once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmddp.launchers.coordinator.restart_policy import (
    Assignment,
    Facts,
    choose_agents,
    decide,
    rules_of,
)

RULES = rules_of({}, 3)
FAILED = Facts(agents=(0, 1, 2), step=7, furthest=5)


@pytest.mark.parametrize(
    ("facts", "restart", "reason"),
    [
        (FAILED, True, "step 7"),
        (replace(FAILED, codes=[None, 1]), True, "step 7"),
        (replace(FAILED, codes=[1, 78]), False, "rules out a restart"),
        (replace(FAILED, codes=[79]), False, "rules out a restart"),
        (replace(FAILED, codes=[76]), False, "rules out a restart"),
        (replace(FAILED, stopping=True), False, "asked to stop"),
        (replace(FAILED, done=True), False, "other ranks have ended already"),
        (replace(FAILED, step=5), False, "beyond step 5"),
        (replace(FAILED, step=4), False, "beyond step 5"),
        (replace(FAILED, step=-1, furthest=-1), False, "no step was completed"),
        (replace(FAILED, step=0, furthest=-1), True, "step 0"),
        (replace(FAILED, restarts=9), True, "step 7"),
        (replace(FAILED, restarts=10), False, "max_restarts_in_place=10"),
        (replace(FAILED, lost=True, step=-1), True, "lost"),
        (replace(FAILED, lost=True, agents=()), False, "no other node"),
        (replace(FAILED, lost=True, restarts=10), False, "max_restarts_in_place"),
        (replace(FAILED, lost=True, stopping=True), False, "asked to stop"),
        (replace(FAILED, codes=[76, 1], unhealthy=True, step=-1), True, "lost"),
        (replace(FAILED, codes=[76, 78], unhealthy=True, step=-1), False, "rules out a restart"),
        (replace(FAILED, codes=[76], lost=True, step=-1), False, "rules out a restart"),
        (replace(FAILED, codes=[76], unhealthy=True, agents=()), False, "no other node"),
        (replace(FAILED, codes=[76], unhealthy=True, restarts=10), False, "max_restarts_in_place"),
    ],
)
def test_an_accident_is_tried_again_and_nothing_else(facts: Facts, restart: bool, reason: str) -> None:
    decision = decide(facts, RULES)
    assert decision.restart is restart
    assert reason in decision.reason


def test_a_program_that_resumes_by_itself_needs_no_step_that_can_be_seen() -> None:
    rules = rules_of({"program": {"script": "fit.py", "resumable": True}}, 3)
    unseen = replace(FAILED, step=-1, furthest=-1)
    assert decide(unseen, rules).restart
    assert not decide(replace(unseen, restarts=10), rules).restart
    assert not decide(replace(unseen, codes=[78]), rules).restart
    assert not decide(unseen, rules_of({"program": {"script": "fit.py"}}, 3)).restart


def test_none_begin_again_where_the_policy_says_so() -> None:
    assert not decide(FAILED, replace(RULES, max_restarts=0)).restart


@pytest.mark.parametrize(
    ("before", "present", "changes", "expected"),
    [
        ((0, 1, 2), {0, 1, 2}, {}, (0, 1, 2)),
        ((0, 1, 2), {0, 2}, {}, ()),
        ((0, 1, 2), {1, 2, 3}, {"spare_nodes": 1}, ()),
        ((0, 1, 2), {1, 2}, {"elastic": True}, ()),
        ((0, 1, 2), {0, 1, 2, 3}, {"spare_nodes": 1}, (0, 1, 2)),
        ((0, 1, 2), {0, 2, 3}, {"spare_nodes": 1}, (0, 3, 2)),
        ((0, 3, 2), {0, 3}, {"spare_nodes": 1}, ()),
        ((0, 3, 2), {0, 3}, {"spare_nodes": 1, "elastic": True}, (0, 3)),
        ((0, 1, 2), {0, 2}, {"elastic": True}, (0, 2)),
        ((0, 1, 2), {0, 2}, {"elastic": True, "samples": 9}, (0,)),
        ((0, 2), {0, 1, 2}, {"elastic": True}, (0, 2, 1)),
        ((0,), {0}, {"elastic": True, "nodes": 1}, (0,)),
    ],
)
def test_who_runs_ranks_next(
    before: tuple[int, ...], present: set[int], changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert choose_agents(before, present, replace(RULES, **changes)) == expected


def test_rules_come_from_the_configuration_and_have_defaults() -> None:
    assert (RULES.nodes, RULES.spare_nodes, RULES.ranks_per_node) == (3, 0, 1)
    assert (RULES.max_restarts, RULES.join_timeout_s) == (10, 300)
    config = {
        "nodes": 4,
        "spare_nodes": 1,
        "ranks_per_node": 8,
        "elastic": True,
        "policy": {"max_restarts_in_place": 0, "join_timeout_s": 20},
        "train": {"global_batch": 64},
    }
    expected = replace(
        RULES,
        nodes=4,
        spare_nodes=1,
        ranks_per_node=8,
        elastic=True,
        max_restarts=0,
        join_timeout_s=20.0,
        samples=64,
    )
    assert rules_of(config, 5) == expected
    assert expected.all_nodes == 5


def test_places_follow_the_order_of_the_agents() -> None:
    assert [Assignment(1, (0, 3, 2)).node_rank(agent) for agent in range(4)] == [0, None, 2, 1]
