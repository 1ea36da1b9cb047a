"""The last moment for a stop, from limits and measured times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.environments.time_limits import RESERVE_S, TimeLimits, leave_at, read_limits
from slurmddp.launchers.agent.stop_requests import DEAF_SHARE, WRITING_SHARE
from slurmddp.training.stopping.deadline import SPREAD, Measured, StepDurations, last_safe_moment, shortfalls


def test_limits_come_from_the_environment() -> None:
    told = {"SLURMDDP_END_TIME": "2000", "SLURMDDP_LEAD_S": "60", "SLURMDDP_KILL_WAIT_S": "30"}
    assert read_limits(told) == TimeLimits(end_time=2000, lead_s=60, kill_wait_s=30)
    assert read_limits({**told, "SLURMDDP_PREEMPT_GRACE_S": "15"}).preempt_grace_s == 15


@pytest.mark.parametrize("text", ["", "Unknown", "UNLIMITED", "-1", "1e9", "nan", "2026-03-01T11:00:00"])
def test_missing_limits_are_unknown(text: str) -> None:
    names = ("END_TIME", "LEAD_S", "KILL_WAIT_S", "PREEMPT_GRACE_S")
    assert read_limits({f"SLURMDDP_{name}": text for name in names}) == TimeLimits()


def test_slurms_end_time_is_used_from_23_02_on() -> None:
    assert read_limits({"SLURM_JOB_END_TIME": "3000"}).end_time == 3000
    assert read_limits({"SLURM_JOB_END_TIME": "3000", "SLURMDDP_END_TIME": "2000"}).end_time == 2000


def test_without_an_end_there_is_no_last_moment() -> None:
    assert last_safe_moment(TimeLimits(), Measured(step_s=1, save_s=10)) is None


def test_the_last_moment_leaves_time_for_steps_and_a_save() -> None:
    limits = TimeLimits(end_time=1000, lead_s=120)
    assert last_safe_moment(limits, Measured(step_s=2, save_s=200)) == 1000 - RESERVE_S - SPREAD * 200 - 4
    assert last_safe_moment(limits, Measured(step_s=2)) == 1000 - RESERVE_S - 120 - 4
    beside = Measured(step_s=2, save_s=200, is_writing=True)
    assert last_safe_moment(limits, beside) == 1000 - RESERVE_S - 2 * SPREAD * 200 - 4


@given(save=st.floats(0, 1e5), step=st.floats(0, 1e4), more=st.floats(0, 1e4))
def test_longer_steps_and_saves_never_mean_a_later_stop(save: float, step: float, more: float) -> None:
    limits = TimeLimits(end_time=1e6)
    moment = last_safe_moment(limits, Measured(step_s=step, save_s=save))
    slower = last_safe_moment(limits, Measured(step_s=step + more, save_s=save))
    longer = last_safe_moment(limits, Measured(step_s=step, save_s=save + more))
    assert moment is not None and slower is not None and longer is not None
    assert max(slower, longer) <= moment < 1e6 - save - step


@pytest.mark.parametrize(
    ("limits", "terminated", "expected"),
    [
        (TimeLimits(), 100, None),
        (TimeLimits(end_time=1000), 100, None),
        (TimeLimits(kill_wait_s=30), 100, 125),
        (TimeLimits(kill_wait_s=8), 100, 104),
        (TimeLimits(kill_wait_s=10), 100, 105),
        (TimeLimits(kill_wait_s=30, preempt_grace_s=600), 100, 725),
        (TimeLimits(kill_wait_s=30, preempt_grace_s=600, end_time=300), 100, 325),
        (TimeLimits(kill_wait_s=30, preempt_grace_s=600, end_time=300), 300, 325),
        (TimeLimits(kill_wait_s=30, preempt_grace_s=600, end_time=300), 310, 335),
    ],
)
def test_a_rank_leaves_just_before_it_is_killed(
    limits: TimeLimits, terminated: float, expected: float | None
) -> None:
    assert leave_at(limits, terminated) == expected


def test_agents_kill_unresponsive_ranks_after_the_guards_and_four_seconds_before_slurm() -> None:
    limits = TimeLimits(kill_wait_s=10)
    assert leave_at(limits, 100) == 105
    assert leave_at(limits, 100, DEAF_SHARE) == 106
    assert leave_at(limits, 100, WRITING_SHARE) == 107


def test_the_pace_counts_long_steps_and_the_longest_save() -> None:
    pace = StepDurations()
    assert pace.measured == Measured()
    for number in range(30):
        pace.add_step(60.0 if number % 15 == 0 else 1.0 + number / 100)
    for seconds in (3, 9, 4):
        pace.add_save(seconds)
    assert pace.measured.save_s == 9
    assert 1.2 < pace.measured.step_s < 1.3
    for _ in range(40):
        pace.add_step(5.0)
    assert pace.measured.step_s == 5


@pytest.mark.parametrize(
    ("limits", "save_s", "about"),
    [
        (TimeLimits(kill_wait_s=30), None, set()),
        (TimeLimits(kill_wait_s=30), 10, set()),
        (TimeLimits(kill_wait_s=30), 21, {"grace"}),
        (TimeLimits(kill_wait_s=30, preempt_grace_s=60), 21, set()),
        (TimeLimits(kill_wait_s=30), 100, {"grace", "lead"}),
        (TimeLimits(lead_s=20), 20, {"lead"}),
    ],
)
def test_limits_too_short_for_a_save_are_named(
    limits: TimeLimits, save_s: float | None, about: set[str]
) -> None:
    found = shortfalls(limits, Measured(save_s=save_s))
    assert set(found) == about
    assert all(f"A save takes {save_s} s" in text for text in found.values())


def test_a_short_lead_is_compensated_only_if_the_end_is_known() -> None:
    measured = Measured(save_s=200)
    assert "policy.signal_lead_s=315" in shortfalls(TimeLimits(), measured)["lead"]
    assert "stops earlier by itself" in shortfalls(TimeLimits(end_time=1000), measured)["lead"]


def test_the_warning_names_the_time_that_a_save_needs() -> None:
    text = shortfalls(TimeLimits(lead_s=1, end_time=1000), Measured(save_s=0.041))["lead"]
    assert text.startswith(
        "A save takes 0.041 s, and 6 s are needed to be safe; policy.signal_lead_s leaves 1 s"
    )
