"""The lost steps of ranks that restart from a state in memory, which no event records."""

from __future__ import annotations

import pytest

from slurmddp.runs.report.goodput import measure
from support.runs.run_events import ended, event, saved, started

BEGUN = [started(100), event("first_step", 110, 0, step=1), saved(121, 10)]
"""A step a second; each save takes a second."""
FAILED = event("rank_failed", 141, 0)
FELL = [*BEGUN, FAILED, event("restarted", 141, 0, restart_count=1, step=30)]


def again(step: int, place: str = "memory", later: float = 0) -> list[dict]:
    resumed = event("resumed", 142 + later, 0, step=step, **{"from": place})
    return [resumed, event("first_step", 143 + later, 0, step=step + 1)]


def parts_of(events: list[dict], end: float = 150, outcome: str = "finished") -> dict[str, float]:
    parts = measure([*events, ended(end, outcome)], now=1e6).parts
    assert sum(parts.values()) == pytest.approx(end - 100)
    return parts


def by_word(events: list[dict]) -> dict[str, float]:
    return parts_of([*events, event("rank_failed", 150, 0)], outcome="failed")


@pytest.mark.parametrize(("resumed", "lost"), [(30, 0), (25, 5), (20, 10), (10, 20)])
def test_the_steps_after_that_state_are_lost(resumed: int, lost: int) -> None:
    parts = parts_of([*FELL, *again(resumed), saved(150, 40)])
    assert parts.get("lost", 0) == pytest.approx(lost, abs=1)
    assert parts["starting"] == 10 + 2


def test_what_only_the_memory_held_is_lost_with_the_attempt() -> None:
    parts = by_word([*FELL, *again(25)])
    assert parts["training"] == pytest.approx(9)
    assert parts["lost"] == pytest.approx(20 + 7)


def test_an_attempt_without_a_save_leaves_nothing_behind_but_what_it_found() -> None:
    first = [started(50), event("first_step", 60, 0, step=1), saved(101, 40), ended(101, "stopped")]
    events = [started(100), event("resumed", 105, 0, step=40, **{"from": "disk"})]
    events += [event("first_step", 110, 0, step=41), FAILED]
    events += [event("restarted", 141, 0, restart_count=1, step=70), *again(65)]
    assert "training" not in by_word(events)
    later = [{**record, "attempt": 1, "time": record["time"] + 10} for record in events]
    parts = measure([*first, *later, ended(160, "failed", attempt=1)], now=1e6).parts
    assert parts["training"] == pytest.approx(39)


@pytest.mark.parametrize("at", [141.5, 142.5, 145])
def test_a_save_that_comes_to_its_end_beside_the_new_ranks_counts(at: float) -> None:
    late = event("saved", at, 0, step=20, seconds=0.0, written_s=at - 131)
    events = sorted([*FELL, *again(25), late], key=lambda record: record["time"])
    assert by_word(events)["training"] == pytest.approx(9 + 10, abs=1)


def test_new_ranks_that_go_on_from_the_disk_have_it_to_fall_back_on() -> None:
    assert by_word([*FELL, *again(30, "disk")])["lost"] == pytest.approx(7)


def test_as_long_as_the_ranks_go_on_nothing_of_it_is_lost() -> None:
    assert "lost" not in measure([*FELL, *again(30)], now=150, running=True).parts
    assert "lost" not in parts_of([*FELL, *again(30), saved(150, 37)])


@pytest.mark.parametrize("resumed", [30, 25])
def test_what_a_rank_that_hung_cost_the_others_is_lost(resumed: int) -> None:
    events = [*BEGUN, event("stalled", 441, 0, restart_count=0, rank=1, phase="step", step=30, seconds=300.0)]
    events += [{**record, "time": 442} for record in FELL[3:]]
    parts = parts_of([*events, *again(resumed, later=301)], 450)
    assert parts["lost"] == pytest.approx(301 + 30 - resumed, abs=1)


def test_the_time_in_which_nobody_had_missed_a_lost_node_is_lost_though_its_last_step_was_not() -> None:
    events = [
        *BEGUN,
        event("restarted", 151, 0, restart_count=1, step=30, silent_s=10.0),
        *again(30, later=10),
    ]
    parts = parts_of([*events, saved(160, 37)], 160)
    assert parts["lost"] == pytest.approx(10)
    assert parts["starting"] == 10 + 2


def test_what_the_agent_saves_at_the_end_counts_up_to_the_moment_of_the_copy() -> None:
    events = [*BEGUN, event("rank_failed", 140, 0)]
    events.append(event("saved", 150, 0, step=25, seconds=8.0, written_s=0.0, copied=135.0))
    parts = parts_of(events, 152, "failed")
    assert (parts["training"], parts["lost"]) == (pytest.approx(23), pytest.approx(5))
    assert (parts["saving"], parts["ending"]) == (pytest.approx(2 + 8), pytest.approx(4))
