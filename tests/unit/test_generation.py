"""Who runs ranks, and whether ranks begin again: every rule once, and the lead's way from word to order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from slurmddp.launchers import failure
from slurmddp.launchers.failure import Failure
from slurmddp.launchers.generation import Facts, Generation, Rules, choose_agents, decide, rules_of
from slurmddp.launchers.lead import Lead
from slurmddp.launchers.watch.culprit import RankReport
from slurmddp.launchers.watch.stragglers import Straggler
from slurmddp.launchers.words import as_facts

RULES = Rules(nodes=3)
FELL = Facts(agents=(0, 1, 2), step=7, furthest=5)


@pytest.mark.parametrize(
    ("facts", "restart", "why"),
    [
        (FELL, True, "step 7"),
        (replace(FELL, codes=[None, 1]), True, "step 7"),
        (replace(FELL, codes=[1, 78]), False, "refused"),
        (replace(FELL, codes=[79]), False, "refused"),
        (replace(FELL, codes=[76]), False, "refused"),
        (replace(FELL, stopping=True), False, "asked to stop"),
        (replace(FELL, done=True), False, "come to their end"),
        (replace(FELL, step=5), False, "beyond step 5"),
        (replace(FELL, step=4), False, "beyond step 5"),
        (replace(FELL, step=-1, furthest=-1), False, "no step was completed"),
        (replace(FELL, step=0, furthest=-1), True, "step 0"),
        (replace(FELL, restarts=9), True, "step 7"),
        (replace(FELL, restarts=10), False, "max_restarts_in_place=10"),
        (replace(FELL, lost=True, step=-1), True, "lost"),
        (replace(FELL, lost=True, agents=()), False, "no other node"),
        (replace(FELL, lost=True, restarts=10), False, "max_restarts_in_place"),
        (replace(FELL, lost=True, stopping=True), False, "asked to stop"),
    ],
)
def test_an_accident_is_tried_again_and_nothing_else(facts: Facts, restart: bool, why: str) -> None:
    decision = decide(facts, RULES)
    assert decision.restart is restart
    assert why in decision.why


def test_none_begin_again_where_the_policy_says_so() -> None:
    assert not decide(FELL, replace(RULES, max_restarts=0)).restart


@pytest.mark.parametrize(
    ("before", "present", "changes", "expected"),
    [
        ((0, 1, 2), {0, 1, 2}, {}, (0, 1, 2)),
        ((0, 1, 2), {0, 2}, {}, ()),
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
    assert rules_of({}, 2) == Rules(nodes=2)
    config = {
        "nodes": 4,
        "spare_nodes": 1,
        "ranks_per_node": 8,
        "elastic": True,
        "policy": {"max_restarts_in_place": 0, "join_timeout_s": 20},
        "train": {"global_batch": 64},
    }
    expected = Rules(
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
    assert [Generation(1, (0, 3, 2)).place(agent) for agent in range(4)] == [0, None, 2, 1]


class Notes:
    """What the lead would have written."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done: list[tuple[Any, ...]] = []
        self.over = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def fell(self, cause: Failure, generation: int) -> None:
        self.done.append(("fell", generation, cause.rank))

    def restarted(self, generation: Generation, before: Generation, cause: Failure, step: int) -> None:
        self.done.append(("restarted", generation, step))

    def go_on_without(self, agents: Collection[int]) -> None:
        if agents:
            self.done.append(("without", set(agents)))

    def failed(self, cause: Failure) -> None:
        self.done.append(("failed", cause.node_rank, cause.rank))

    def stalled(self, report: RankReport, generation: int) -> None:
        self.done.append(("stalled", generation, report.rank))

    def slow(self, found: Straggler, generation: int) -> None:
        self.done.append(("slow", generation, found.rank))

    def is_over(self) -> bool:
        return self.over


class Attempt:
    """A lead of three nodes, n0 to n2, with what it has ordered since the last look."""

    def __init__(self, **changes: Any) -> None:
        self.notes = Notes()
        rules = replace(RULES, **changes)
        hosts = [f"n{agent}" for agent in range(rules.all_nodes)]
        self.lead = Lead(rules, hosts, self.notes, 0.0)

    def ordered(self) -> list[tuple[int, str]]:
        orders = [(to, message["kind"]) for to, message in self.lead.orders]
        self.lead.orders.clear()
        return orders

    def begin(self) -> Attempt:
        self.lead.look(0.1)
        self.ordered()
        return self

    def hear(self, sender: int, kind: str, now: float = 1.0, **facts: Any) -> list[tuple[int, str]]:
        generation = facts.pop("generation", 0)
        self.lead.take(sender, {"kind": kind, "generation": generation, "step": 7, **facts}, now)
        return self.ordered()

    def fall(self, sender: int, now: float = 1.0, **of: Any) -> list[tuple[int, str]]:
        return self.hear(sender, "fell", now, failures=[as_facts(fallen(sender, **of))])

    def stopped(self, sender: int, *failures: Failure, **facts: Any) -> list[tuple[int, str]]:
        return self.hear(sender, "stopped", failures=[as_facts(one) for one in failures], **facts)


def fallen(node: int, *, rank: int | None = 0, code: int = -9, lines: tuple[str, ...] = ()) -> Failure:
    return failure.here(code, node_rank=node, rank=rank, lines=lines)


LOST_PEER = ("RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [127.0.0.1]:1",)


def to_all(kind: str, *agents: int) -> list[tuple[int, str]]:
    return [(agent, kind) for agent in sorted(agents or (0, 1, 2), reverse=True)]


def test_ranks_begin_once_all_agents_are_there() -> None:
    attempt = Attempt()
    attempt.lead.look(0.1, missing=[2])
    assert attempt.ordered() == []
    attempt.lead.look(0.2)
    assert attempt.ordered() == to_all("go")


def test_who_is_missing_is_named_after_three_seconds_and_every_ten() -> None:
    attempt = Attempt()
    for now in (2.9, 3.0, 4.0, 12.9, 13.1, 20.0):
        attempt.lead.look(now, missing=[2])
    assert len(attempt.notes.said) == 2
    assert attempt.notes.said[0].startswith("waiting for node 2 (n2); 2 of 3 nodes are here")


def test_a_node_that_does_not_come_ends_the_attempt_with_its_name() -> None:
    attempt = Attempt(join_timeout_s=20.0)
    attempt.lead.look(19.9, missing=[2])
    assert attempt.ordered() == []
    attempt.lead.look(20.1, missing=[2])
    assert attempt.ordered() == to_all("end", 0, 1)
    assert attempt.notes.done == [("failed", 2, None)]


def test_spares_are_not_waited_for_long_and_may_come_later() -> None:
    attempt = Attempt(spare_nodes=1)
    attempt.lead.look(9.9, missing=[1])
    assert attempt.ordered() == []
    attempt.lead.look(10.1, missing=[1])
    assert attempt.lead.orders[0][1]["agents"] == [0, 3, 2]
    assert attempt.ordered() == to_all("go", 0, 2, 3)
    assert attempt.hear(1, "arrived") == []
    assert attempt.hear(3, "lost", why="no heartbeat for 10 s") == to_all("stop", 0, 2)


def test_with_elastic_those_that_have_come_begin_in_the_end() -> None:
    attempt = Attempt(elastic=True, join_timeout_s=20.0)
    attempt.lead.look(20.1, missing=[2])
    assert attempt.ordered() == to_all("go", 0, 1)


def test_one_round_of_words_lies_between_a_fall_and_the_next_generation() -> None:
    attempt = Attempt().begin()
    assert attempt.fall(1, rank=1) == to_all("stop")
    assert attempt.stopped(0) == attempt.stopped(2) == []
    assert attempt.stopped(1) == to_all("go")
    after = Generation(1, (0, 1, 2))
    assert attempt.notes.done == [("fell", 0, 1), ("restarted", after, 7)]
    assert attempt.fall(1) == [], "a word of the generation that is gone"
    assert attempt.hear(1, "fell", generation=1, failures=[as_facts(fallen(1))]) == to_all("end")
    assert "no step was completed beyond step 7" in attempt.notes.said[-1]


def test_a_refusal_that_comes_to_light_while_all_are_ended_is_the_end() -> None:
    attempt = Attempt().begin()
    assert attempt.fall(0, rank=0, code=1, lines=LOST_PEER) == to_all("stop")
    attempt.stopped(0)
    attempt.stopped(1, fallen(1, rank=1, code=78))
    assert attempt.stopped(2) == to_all("end")
    assert attempt.notes.done == [("failed", 1, 1)]


def test_the_cause_is_named_rather_than_who_lost_it() -> None:
    attempt = Attempt().begin()
    attempt.fall(0, rank=0, code=1, lines=LOST_PEER)
    attempt.stopped(1, fallen(1, rank=1))
    attempt.stopped(0)
    attempt.stopped(2)
    assert attempt.notes.done[0] == ("fell", 0, 1)


def test_before_the_attempt_ends_the_cause_is_waited_for_a_moment() -> None:
    attempt = Attempt(max_restarts=0).begin()
    assert attempt.fall(0, rank=0, code=1, lines=LOST_PEER) == []
    assert attempt.lead.next_look == pytest.approx(1.3)
    assert attempt.fall(1, 1.1, rank=1) == to_all("end")
    assert attempt.notes.done == [("failed", 1, 1)]


def test_a_cause_that_does_not_come_is_not_waited_for() -> None:
    attempt = Attempt(max_restarts=0).begin()
    attempt.fall(0, rank=0, code=1, lines=LOST_PEER)
    attempt.lead.look(1.29)
    assert attempt.ordered() == []
    attempt.lead.look(1.31)
    assert attempt.ordered() == to_all("end")


def test_a_node_that_is_lost_while_all_are_ended_is_not_waited_for() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    attempt.fall(0, rank=0, code=1, lines=LOST_PEER)
    attempt.stopped(0)
    attempt.stopped(2)
    assert attempt.hear(1, "lost", why="no heartbeat for 10 s") == to_all("go", 0, 2, 3)
    assert attempt.notes.done[0] == ("fell", 0, None)
    assert attempt.notes.done[1] == ("restarted", Generation(1, (0, 3, 2)), 7)


def test_a_spare_that_is_lost_is_only_told_of() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert attempt.hear(3, "lost", why="connection closed") == []
    assert attempt.notes.said == ["node 3 (n3) is lost: connection closed"]


def test_fewer_nodes_that_ranks_refuse_end_the_attempt_as_the_loss_would_have() -> None:
    attempt = Attempt(elastic=True).begin()
    attempt.hear(1, "lost", why="connection closed")
    attempt.stopped(0)
    assert attempt.stopped(2) == to_all("go", 0, 2)
    refused = as_facts(fallen(2, rank=1, code=78))
    attempt.lead.take(2, {"kind": "fell", "generation": 1, "step": -1, "failures": [refused]}, 2.0)
    assert [message for _, message in attempt.lead.orders] == [{"kind": "end", "code": 1}] * 2
    assert attempt.notes.done[-1] == ("failed", 1, None)


@pytest.mark.parametrize("by_word", [True, False], ids=["a word of its own", "with its answer"])
def test_a_stop_between_two_generations_is_a_stop(by_word: bool) -> None:
    attempt = Attempt().begin()
    attempt.fall(1)
    if by_word:
        attempt.hear(2, "stopping")
    attempt.stopped(0)
    attempt.stopped(1)
    assert attempt.stopped(2, stopping=not by_word) == to_all("leave")
    assert [kind for kind, *_ in attempt.notes.done] == ["fell"]


def test_a_stop_before_the_first_ranks_lets_all_leave() -> None:
    attempt = Attempt()
    attempt.lead.look(0.1, missing=[2])
    attempt.ordered()
    attempt.lead.take(1, {"kind": "stopping"}, 0.2)
    assert [message for _, message in attempt.lead.orders] == [{"kind": "leave", "code": 75}] * 2


def test_a_stop_that_came_while_modules_were_imported_lets_node_0_leave() -> None:
    attempt = Attempt()
    assert attempt.hear(0, "stopping", generation=-1) == to_all("leave", 0)


def test_a_loss_that_shows_a_moment_later_is_the_cause_and_no_matter_of_progress() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    lost_peer = as_facts(fallen(0, rank=0, code=1, lines=LOST_PEER))
    assert attempt.hear(0, "fell", step=-1, failures=[lost_peer]) == []
    assert attempt.hear(1, "lost", why="connection closed") == to_all("stop", 0, 2)


def test_a_run_that_a_person_has_ended_does_not_begin_again() -> None:
    attempt = Attempt().begin()
    attempt.notes.over = True
    assert attempt.fall(1) == to_all("end")


def test_all_leave_when_all_are_done() -> None:
    attempt = Attempt().begin()
    assert attempt.hear(0, "done", code=0) == attempt.hear(1, "done", code=0) == []
    assert attempt.hear(2, "done", code=0) == to_all("leave")


def test_ranks_that_outlive_a_stop_elsewhere_are_told_of_it() -> None:
    attempt = Attempt().begin()
    attempt.hear(1, "done", code=75)
    attempt.lead.look(1.8)
    assert attempt.ordered() == []
    attempt.lead.look(2.0)
    assert attempt.ordered() == to_all("pass_on", 0, 2)


def test_a_failure_after_others_are_done_ends_the_attempt() -> None:
    attempt = Attempt().begin()
    attempt.hear(1, "done", code=0)
    assert attempt.fall(2) == to_all("end")


def test_an_agent_that_can_not_go_on_counts_as_lost() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert attempt.fall(1, rank=None, code=1) == to_all("stop", 0, 2)
    attempt.stopped(0)
    attempt.stopped(2)
    assert ("restarted", Generation(1, (0, 3, 2)), 7) in attempt.notes.done


def report(rank: int, phase: str, seconds: float, limit_s: float) -> dict[str, Any]:
    facts = {"rank": rank, "host": f"n{rank}", "phase": phase, "step": 7, "state": "S"}
    stack = (f"{phase}.py:12 in wait",)
    return RankReport(**facts, seconds=seconds, limit_s=limit_s, stack=stack).to_json()


def test_a_rank_that_holds_up_all_others_counts_as_fallen() -> None:
    attempt = Attempt().begin()
    assert attempt.hear(2, "stall", rank=2, phase="step", seconds=300.0, limit_s=300.0) == to_all("report")
    for rank in (0, 2):
        assert attempt.hear(rank, "report", reports=[report(rank, "step", 310.0, 300.0)]) == []
    assert attempt.hear(1, "report", reports=[report(1, "data", 1000.0, 900.0)]) == to_all("stop")
    for agent in (0, 1, 2):
        last = attempt.stopped(agent)
    assert last == to_all("go")
    after = Generation(1, (0, 1, 2))
    assert attempt.notes.done == [("stalled", 0, 1), ("fell", 0, 1), ("restarted", after, 7)]
