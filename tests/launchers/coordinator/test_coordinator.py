"""The coordinator's way from a message to its orders, through the worker groups of an attempt."""

from __future__ import annotations

import pytest

from slurmddp.launchers.coordinator.messages import (
    Fail,
    HangSuspected,
    Joined,
    KillWorkers,
    Leave,
    Lost,
    OthersDone,
    PaceReported,
    ReportStacks,
    RequestStop,
    StacksReported,
    StartWorkers,
    StopRequested,
    WorkersDone,
    WorkersFailed,
    WorkersKilled,
)
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from support.runs.coordinator_attempts import LOST_PEER, Attempt, failed, to_all


def test_ranks_begin_once_all_agents_are_there() -> None:
    attempt = Attempt()
    attempt.coordinator.poll(0.1, missing=[2])
    assert attempt.taken_orders() == []
    attempt.coordinator.poll(0.2)
    assert attempt.taken_orders() == to_all(StartWorkers)


def test_who_is_missing_is_named_after_three_seconds_and_every_ten() -> None:
    attempt = Attempt()
    assert attempt.coordinator.next_deadline == 3.0
    for now in (2.9, 3.0, 4.0, 12.9, 13.1, 20.0):
        attempt.coordinator.poll(now, missing=[2])
    assert len(attempt.notes.lines) == 2
    assert attempt.notes.lines[0].startswith("waiting for node 2 (n2); 2 of 3 nodes have joined")
    recorded = attempt.notes.awaited
    assert [f"waiting for {nodes}" for nodes in recorded] == attempt.notes.lines[:1], (
        "recorded again unchanged"
    )
    attempt.coordinator.poll(21.0)
    assert recorded[1:] == [""], "the wait is over"


def test_a_node_that_does_not_come_ends_the_attempt_with_its_name() -> None:
    attempt = Attempt(join_timeout_s=20.0)
    attempt.coordinator.poll(19.9, missing=[2])
    assert attempt.taken_orders() == []
    attempt.coordinator.poll(20.1, missing=[2])
    assert attempt.taken_orders() == to_all(Fail, 0, 1)
    assert attempt.notes.done == [("failed", 2, None)]


def test_spares_are_not_waited_for_long_and_may_come_later() -> None:
    attempt = Attempt(spare_nodes=1)
    attempt.coordinator.poll(9.9, missing=[1])
    assert attempt.taken_orders() == []
    attempt.coordinator.poll(10.1, missing=[1])
    assert attempt.coordinator.orders[0][1].agents == (0, 3, 2)
    assert attempt.taken_orders() == to_all(StartWorkers, 0, 2, 3)
    assert attempt.orders(1, Joined) == []
    assert attempt.orders(3, Lost, why="no heartbeat for 10 s") == to_all(KillWorkers, 0, 2)


def test_one_round_of_messages_lies_between_a_failure_and_the_restart() -> None:
    attempt = Attempt().begin()
    assert attempt.fail(1, rank=1) == to_all(KillWorkers)
    assert attempt.killed(0) == attempt.killed(2) == []
    assert attempt.killed(1) == to_all(StartWorkers)
    after = Assignment(1, (0, 1, 2))
    assert attempt.notes.done == [("group_failed", 0, 1), ("restarted", after, 7)]
    assert attempt.fail(1) == [], "a message of ranks that are gone"
    assert attempt.orders(1, WorkersFailed, restart_count=1, failures=(failed(1),)) == to_all(Fail)
    assert "no step was completed beyond step 7" in attempt.notes.lines[-1]


def test_no_log_is_read_before_the_ranks_are_ordered_to_restart() -> None:
    attempt, read = Attempt().begin(), []

    def lines() -> tuple[str, ...]:
        read.append(list(attempt.coordinator.orders))
        return ("ValueError: 7",)

    found = capture.unexplained(1, lines, node_rank=0, rank=0)
    attempt.coordinator.receive(
        0, WorkersFailed(restart_count=0, step=7, silent_s=0.0, failures=(found,)), 1.0
    )
    attempt.taken_orders()
    attempt.killed(1)
    attempt.killed(2)
    attempt.receive(0, WorkersKilled)
    assert read == []
    assert attempt.taken_orders() == to_all(StartWorkers)
    assert read == [[]], "read once, when no order is left to send"
    assert [one.last_lines for one in attempt.notes.causes] == [("ValueError: 7",)] * 2


def test_messages_of_ranks_before_a_restart_count_for_nothing() -> None:
    attempt = Attempt().begin()
    attempt.fail(1, rank=1)
    for agent in (0, 1, 2):
        attempt.killed(agent)
    assert attempt.orders(2, HangSuspected, restart_count=0) == []
    assert [attempt.orders(agent, WorkersDone, restart_count=0, code=0) for agent in (0, 1, 2)] == [
        [],
        [],
        [],
    ]
    facts = {"restart_count": 1, "step": 9, "failures": [failed(1, rank=1)]}
    assert attempt.orders(1, WorkersFailed, **facts) == to_all(KillWorkers)
    assert [attempt.killed(agent, restart_count=0) for agent in (0, 1, 2)] == [[], [], []]
    assert [attempt.killed(agent, restart_count=1) for agent in (0, 1, 2)] == [[], [], to_all(StartWorkers)]


def test_a_refusal_that_comes_to_light_while_all_are_ended_is_the_end() -> None:
    attempt = Attempt().begin()
    assert attempt.fail(0, rank=0, code=1, lines=LOST_PEER) == to_all(KillWorkers)
    attempt.killed(0)
    attempt.killed(1, failed(1, rank=1, code=78))
    assert attempt.killed(2) == to_all(Fail)
    assert attempt.notes.done == [("failed", 1, 1)]


def test_the_cause_is_named_rather_than_who_lost_it() -> None:
    attempt = Attempt().begin()
    attempt.fail(0, rank=0, code=1, lines=LOST_PEER)
    attempt.killed(1, failed(1, rank=1))
    attempt.killed(0)
    attempt.killed(2)
    assert attempt.notes.done[0] == ("group_failed", 0, 1)


def test_before_the_attempt_ends_the_cause_is_waited_for_a_moment() -> None:
    attempt = Attempt(max_restarts=0).begin()
    assert attempt.fail(0, rank=0, code=1, lines=LOST_PEER) == []
    assert attempt.coordinator.next_deadline == pytest.approx(1.3)
    assert attempt.fail(1, 1.1, rank=1) == to_all(Fail)
    assert attempt.notes.done == [("failed", 1, 1)]


def test_a_cause_that_does_not_come_is_not_waited_for() -> None:
    attempt = Attempt(max_restarts=0).begin()
    attempt.fail(0, rank=0, code=1, lines=LOST_PEER)
    attempt.coordinator.poll(1.29)
    assert attempt.taken_orders() == []
    attempt.coordinator.poll(1.31)
    assert attempt.taken_orders() == to_all(Fail)


def test_a_node_that_is_lost_while_all_are_ended_is_not_waited_for() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    attempt.fail(0, rank=0, code=1, lines=LOST_PEER)
    attempt.killed(0)
    attempt.killed(2)
    assert attempt.orders(1, Lost, why="no heartbeat for 10 s") == to_all(StartWorkers, 0, 2, 3)
    assert attempt.notes.done[0] == ("group_failed", 0, None)
    assert attempt.notes.done[1] == ("restarted", Assignment(1, (0, 3, 2)), 7)


def test_a_spare_that_is_lost_is_only_told_of() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert attempt.orders(3, Lost, why="connection closed") == []
    assert attempt.notes.lines == ["node 3 (n3) was lost: connection closed"]


def test_fewer_nodes_that_ranks_refuse_end_the_attempt_as_the_loss_would_have() -> None:
    attempt = Attempt(elastic=True).begin()
    attempt.orders(1, Lost, why="connection closed")
    attempt.killed(0)
    assert attempt.killed(2) == to_all(StartWorkers, 0, 2)
    refused = failed(2, rank=1, code=78)
    assert attempt.send(2, WorkersFailed, restart_count=1, step=-1, failures=(refused,)) == [Fail(code=1)] * 2
    assert attempt.notes.done[-1] == ("failed", 1, None)


@pytest.mark.parametrize(("code", "step"), [(1, -1), (78, 9)], ids=["a crash", "a refusal later on"])
def test_what_ends_ranks_on_fewer_nodes_otherwise_is_told_as_itself(code: int, step: int) -> None:
    attempt = Attempt(elastic=True).begin()
    attempt.orders(1, Lost, why="connection closed")
    attempt.killed(0)
    attempt.killed(2)
    refused = failed(2, rank=1, code=code)
    assert attempt.orders(2, WorkersFailed, restart_count=1, step=step, failures=(refused,)) == to_all(
        Fail, 0, 2
    )
    assert attempt.notes.done[-1] == ("failed", 2, 1)


@pytest.mark.parametrize("told", ["by a message", "by a person's file"])
def test_a_stop_during_a_restart_is_a_stop(told: str) -> None:
    attempt = Attempt().begin()
    attempt.fail(1)
    if told == "by a message":
        attempt.orders(2, StopRequested, signal=15)
    attempt.notes.over = told == "by a person's file"
    attempt.killed(0)
    attempt.killed(1)
    assert attempt.killed(2) == to_all(Leave)
    assert [kind for kind, *_ in attempt.notes.done] == ["group_failed"]


@pytest.mark.parametrize("told", ["by a signal", "by a person's file"])
def test_a_stop_before_the_first_ranks_lets_all_leave(told: str) -> None:
    attempt = Attempt()
    attempt.coordinator.poll(0.1, missing=[2])
    assert attempt.taken_orders() == []
    attempt.notes.over = told == "by a person's file"
    if told == "by a signal":
        attempt.orders(1, StopRequested, signal=15)
    attempt.coordinator.poll(0.2, missing=[2])
    assert [order for _, order in attempt.coordinator.orders] == [Leave(code=75)] * 2


def test_a_stop_that_came_while_modules_were_imported_lets_node_0_leave() -> None:
    attempt = Attempt()
    attempt.orders(0, StopRequested, signal=15)
    attempt.coordinator.poll(0.1, missing=[1, 2])
    assert attempt.taken_orders() == to_all(Leave, 0)


def test_a_loss_that_shows_a_moment_later_is_the_cause_and_no_matter_of_progress() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    lost_peer = failed(0, rank=0, code=1, lines=LOST_PEER)
    assert attempt.orders(0, WorkersFailed, step=-1, failures=(lost_peer,)) == []
    assert attempt.orders(1, Lost, why="connection closed") == to_all(KillWorkers, 0, 2)


def test_a_run_that_a_person_has_ended_does_not_begin_again() -> None:
    attempt = Attempt().begin()
    attempt.notes.over = True
    assert attempt.fail(1) == to_all(Fail)


def test_all_leave_when_all_are_done() -> None:
    attempt = Attempt().begin()
    assert attempt.orders(0, WorkersDone, code=0) == to_all(OthersDone, 1, 2)
    assert attempt.orders(1, WorkersDone, code=0) == []
    assert attempt.orders(2, WorkersDone, code=0) == to_all(Leave)
    assert attempt.orders(1, Lost, why="connection closed") == []
    assert attempt.notes.lines == [], "who leaves is not lost"


def test_a_stop_of_one_node_is_forwarded_to_the_others_at_once() -> None:
    attempt = Attempt().begin()
    attempt.orders(2, WorkersDone, code=0)
    assert attempt.send(1, StopRequested, signal=10) == [RequestStop(signal=10)]
    assert attempt.taken_orders() == to_all(RequestStop, 0)
    assert attempt.orders(0, StopRequested, signal=10) == [], "they are told once"


def test_it_is_told_once_that_ranks_have_ended_and_once_that_some_have_stopped() -> None:
    attempt = Attempt(nodes=4).begin()
    assert attempt.send(1, WorkersDone, code=0) == [OthersDone(code=0)] * 3
    assert attempt.taken_orders() == to_all(OthersDone, 0, 2, 3)
    assert attempt.send(2, WorkersDone, code=75) == [OthersDone(code=75)] * 2
    assert attempt.taken_orders() == to_all(OthersDone, 0, 3)
    assert attempt.orders(3, WorkersDone, code=75) == []


def test_ranks_that_finish_a_little_later_than_others_are_left_alone() -> None:
    attempt = Attempt().begin()
    attempt.orders(1, WorkersDone, code=0)
    attempt.coordinator.poll(2.0)
    assert attempt.taken_orders() == []


def test_a_failure_after_others_are_done_ends_the_attempt() -> None:
    attempt = Attempt().begin()
    attempt.orders(1, WorkersDone, code=0)
    assert attempt.fail(2) == to_all(Fail)
    assert attempt.fail(0) == [], "it ends once"
    assert attempt.notes.done == [("failed", 2, 0)]


def test_an_agent_that_can_not_go_on_counts_as_lost() -> None:
    attempt = Attempt(spare_nodes=1).begin()
    assert attempt.unable(1) == to_all(KillWorkers, 0, 2)
    attempt.killed(0)
    attempt.killed(2)
    assert ("restarted", Assignment(1, (0, 3, 2)), 7) in attempt.notes.done


def report(rank: int, phase: str, seconds: float, limit_s: float) -> RankReport:
    facts = {"rank": rank, "host": f"n{rank}", "phase": phase, "step": 7, "state": "S"}
    stack = (f"{phase}.py:12 in wait",)
    return RankReport(**facts, seconds=seconds, limit_s=limit_s, stack=stack)


def test_a_rank_that_holds_up_all_others_counts_as_fallen() -> None:
    attempt = Attempt().begin()
    assert attempt.orders(2, HangSuspected) == to_all(ReportStacks)
    for rank in (0, 2):
        assert attempt.orders(rank, StacksReported, reports=[report(rank, "step", 310.0, 300.0)]) == []
    assert attempt.orders(1, StacksReported, reports=[report(1, "data", 1000.0, 900.0)]) == to_all(
        KillWorkers
    )
    for agent in (0, 1, 2):
        last = attempt.killed(agent)
    assert last == to_all(StartWorkers)
    after = Assignment(1, (0, 1, 2))
    assert attempt.notes.done == [("stalled", 0, 1), ("group_failed", 0, 1), ("restarted", after, 7)]


def test_a_report_that_does_not_come_is_not_waited_for() -> None:
    attempt = Attempt().begin()
    attempt.orders(2, HangSuspected)
    for rank in (0, 2):
        attempt.orders(rank, StacksReported, reports=[report(rank, "step", 310.0, 300.0)])
    due = attempt.coordinator.next_deadline
    assert due is not None
    attempt.coordinator.poll(due - 0.1)
    assert attempt.taken_orders() == []
    attempt.coordinator.poll(due)
    assert attempt.taken_orders() == to_all(KillWorkers)


def test_an_agent_that_can_not_go_on_before_the_ranks_begin_ends_the_attempt() -> None:
    attempt = Attempt()
    attempt.coordinator.poll(0.1, missing=[2])
    assert attempt.unable(1, code=78) == to_all(Fail, 0)
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
            attempt.orders(rank, PaceReported, 30.0 * number, paces={rank: pace})
    assert attempt.notes.done == [("slow", 0, 2)]
    assert [text for text in attempt.notes.lines if text.startswith("slowest: rank 2 on n2")]


def test_the_records_of_a_restart_wait_for_its_orders_and_for_nothing_else() -> None:
    attempt = Attempt().begin()
    attempt.fail(1, rank=1)
    attempt.killed(0)
    attempt.killed(2)
    attempt.receive(1, WorkersKilled)
    assert attempt.coordinator.orders[0][1].restart_count == 1
    assert attempt.notes.done == []
    attempt.coordinator.fail(failed(0, rank=None))  # The ranks could not be started here.
    assert [kind for kind, *_ in attempt.notes.done] == ["group_failed", "restarted", "failed"]
