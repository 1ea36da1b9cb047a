"""The lead's way from word to order, through the generations of an attempt."""

from __future__ import annotations

from typing import Any

import pytest
from lead_attempts import LOST_PEER, Attempt, fallen, to_all

from slurmddp.launchers.coordinator.messages import as_facts
from slurmddp.launchers.coordinator.restart_policy import Generation
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport


def test_ranks_begin_once_all_agents_are_there() -> None:
    attempt = Attempt()
    attempt.lead.look(0.1, missing=[2])
    assert attempt.ordered() == []
    attempt.lead.look(0.2)
    assert attempt.ordered() == to_all("go")


def test_who_is_missing_is_named_after_three_seconds_and_every_ten() -> None:
    attempt = Attempt()
    assert attempt.lead.next_look == 3.0
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


def test_words_of_a_generation_that_is_gone_count_for_nothing() -> None:
    attempt = Attempt().begin()
    attempt.fall(1, rank=1)
    for agent in (0, 1, 2):
        attempt.stopped(agent)
    stall = {"rank": 2, "phase": "step", "seconds": 300.0, "limit_s": 300.0}
    assert attempt.hear(2, "stall", generation=0, **stall) == []
    assert [attempt.hear(agent, "done", generation=0, code=0) for agent in (0, 1, 2)] == [[], [], []]
    fell = {"generation": 1, "step": 9, "failures": [as_facts(fallen(1, rank=1))]}
    assert attempt.hear(1, "fell", **fell) == to_all("stop")
    assert [attempt.stopped(agent, generation=0) for agent in (0, 1, 2)] == [[], [], []]
    assert [attempt.stopped(agent, generation=1) for agent in (0, 1, 2)] == [[], [], to_all("go")]


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
    assert attempt.notes.said == ["node 3 (n3) was lost: connection closed"]


def test_fewer_nodes_that_ranks_refuse_end_the_attempt_as_the_loss_would_have() -> None:
    attempt = Attempt(elastic=True).begin()
    attempt.hear(1, "lost", why="connection closed")
    attempt.stopped(0)
    assert attempt.stopped(2) == to_all("go", 0, 2)
    refused = as_facts(fallen(2, rank=1, code=78))
    attempt.lead.take(2, {"kind": "fell", "generation": 1, "step": -1, "failures": [refused]}, 2.0)
    assert [message for _, message in attempt.lead.orders] == [{"kind": "end", "code": 1}] * 2
    assert attempt.notes.done[-1] == ("failed", 1, None)


@pytest.mark.parametrize(("code", "step"), [(1, -1), (78, 9)], ids=["a crash", "a refusal later on"])
def test_what_ends_ranks_on_fewer_nodes_otherwise_is_told_as_itself(code: int, step: int) -> None:
    attempt = Attempt(elastic=True).begin()
    attempt.hear(1, "lost", why="connection closed")
    attempt.stopped(0)
    attempt.stopped(2)
    refused = as_facts(fallen(2, rank=1, code=code))
    assert attempt.hear(2, "fell", generation=1, step=step, failures=[refused]) == to_all("end", 0, 2)
    assert attempt.notes.done[-1] == ("failed", 2, 1)


@pytest.mark.parametrize("told", ["by a word of its own", "with an answer", "by a person's file"])
def test_a_stop_between_two_generations_is_a_stop(told: str) -> None:
    attempt = Attempt().begin()
    attempt.fall(1)
    if told == "by a word of its own":
        attempt.hear(2, "stopping")
    attempt.notes.over = told == "by a person's file"
    attempt.stopped(0)
    attempt.stopped(1)
    assert attempt.stopped(2, stopping=told == "with an answer") == to_all("leave")
    assert [kind for kind, *_ in attempt.notes.done] == ["fell"]


@pytest.mark.parametrize("told", ["by a signal", "by a person's file"])
def test_a_stop_before_the_first_ranks_lets_all_leave(told: str) -> None:
    attempt = Attempt()
    attempt.lead.look(0.1, missing=[2])
    assert attempt.ordered() == []
    attempt.notes.over = told == "by a person's file"
    if told == "by a signal":
        attempt.lead.take(1, {"kind": "stopping"}, 0.2)
    attempt.lead.look(0.2, missing=[2])
    assert [message for _, message in attempt.lead.orders] == [{"kind": "leave", "code": 75}] * 2


def test_a_stop_that_came_while_modules_were_imported_lets_node_0_leave() -> None:
    attempt = Attempt()
    attempt.hear(0, "stopping", generation=-1)
    attempt.lead.look(0.1, missing=[1, 2])
    assert attempt.ordered() == to_all("leave", 0)


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
    assert attempt.hear(0, "done", code=0) == to_all("others_left", 1, 2)
    assert attempt.hear(1, "done", code=0) == []
    assert attempt.hear(2, "done", code=0) == to_all("leave")
    assert attempt.hear(1, "lost", why="connection closed") == []
    assert attempt.notes.said == [], "who leaves is not lost"


def test_ranks_that_outlive_a_stop_elsewhere_are_told_of_it() -> None:
    attempt = Attempt().begin()
    attempt.hear(1, "done", code=75)
    attempt.lead.look(1.8)
    assert attempt.ordered() == []
    attempt.lead.look(2.0)
    assert attempt.ordered() == to_all("pass_on", 0, 2)
    attempt.lead.look(2.1)
    assert attempt.ordered() == [], "they are told once"


def test_ranks_that_finish_a_little_later_than_others_are_left_alone() -> None:
    attempt = Attempt().begin()
    attempt.hear(1, "done", code=0)
    attempt.lead.look(2.0)
    assert attempt.ordered() == []


def test_a_failure_after_others_are_done_ends_the_attempt() -> None:
    attempt = Attempt().begin()
    attempt.hear(1, "done", code=0)
    assert attempt.fall(2) == to_all("end")
    assert attempt.fall(0) == [], "it ends once"
    assert attempt.notes.done == [("failed", 2, 0)]


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


def test_a_report_that_does_not_come_is_not_waited_for() -> None:
    attempt = Attempt().begin()
    attempt.hear(2, "stall", rank=2, phase="step", seconds=300.0, limit_s=300.0)
    for rank in (0, 2):
        attempt.hear(rank, "report", reports=[report(rank, "step", 310.0, 300.0)])
    due = attempt.lead.next_look
    assert due is not None
    attempt.lead.look(due - 0.1)
    assert attempt.ordered() == []
    attempt.lead.look(due)
    assert attempt.ordered() == to_all("stop")


def test_an_agent_that_can_not_go_on_before_the_ranks_begin_ends_the_attempt() -> None:
    attempt = Attempt()
    attempt.lead.look(0.1, missing=[2])
    refused = fallen(1, rank=None, code=78)
    assert attempt.hear(1, "fell", generation=-1, failures=[as_facts(refused)]) == to_all("end", 0)
    assert attempt.notes.done == [("failed", 1, None)]


def test_the_rank_that_all_wait_for_is_noted_once() -> None:
    attempt = Attempt().begin()
    for number in range(1, 5):
        for rank, wait_s in enumerate((0.0, 0.0, 10.0)):
            pace = Pace(
                host=f"n{rank}",
                step=20 * number,
                steps=20 * number,
                step_s=20.0 * number,
                wait_s=wait_s * number,
                forward_s=2.0 * number,
            )
            attempt.hear(rank, "pace", 30.0 * number, paces={str(rank): pace.to_json()})
    assert attempt.notes.done == [("slow", 0, 2)]
    assert [text for text in attempt.notes.said if text.startswith("slowest: rank 2 on n2")]
