"""When a node's ranks have come to a standstill, and when they have not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.watchdog.hang import LIMITS_S, Hang, Watchdog

STEP = RankHeartbeat(
    phase="step",
    since=100.0,
    step=7,
    resumed=0,
    steps=7,
    stepped=100.0,
    step_s=7.0,
    wait_s=0.0,
    watched=True,
)


class Clock:
    """Looks once a second, as the agent does."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog, self.now = watchdog, 100.0

    def wait(self, seconds: float, beats: dict[int, RankHeartbeat]) -> Hang | None:
        """Return the first stall within `seconds` in which nothing changes."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            if stall := self.watchdog.poll(beats, self.now):
                return stall
        return None

    def working(self, beat: RankHeartbeat) -> RankHeartbeat:
        return replace(beat, since=self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock(Watchdog(None))


def test_a_step_that_never_ends_is_found_once_it_has_had_its_time(clock: Clock) -> None:
    beats = {0: STEP, 1: replace(STEP, phase="data", since=101.0)}
    assert clock.wait(LIMITS_S["data"] - 5, beats) is None
    stall = clock.wait(60, beats)
    assert stall is not None
    assert (stall.rank, stall.phase, stall.step) == (0, "step", 7)
    assert stall.seconds >= LIMITS_S["data"] - 5


def test_it_is_told_again_but_not_at_every_look(clock: Clock) -> None:
    assert clock.wait(400, {0: STEP})
    assert clock.wait(60, {0: STEP}) is None
    assert clock.wait(60, {0: STEP}) is not None


def test_nobody_stalls_while_one_shows_signs_of_life(clock: Clock) -> None:
    for _ in range(40):
        at_work = clock.working(replace(STEP, phase="evaluating"))
        assert clock.wait(60, {0: at_work, 1: STEP}) is None


def test_code_that_shows_no_signs_is_not_judged(clock: Clock) -> None:
    assert clock.wait(100_000, {0: replace(STEP, watched=False), 1: STEP}) is None
    assert clock.wait(100_000, {0: replace(STEP, phase="starting")}) is None


def test_what_took_long_and_went_well_may_take_longer(clock: Clock) -> None:
    saving = replace(STEP, phase="saving")
    clock.wait(0.5 * LIMITS_S["saving"], {0: saving})
    clock.wait(1, {0: clock.working(STEP)})
    saving = clock.working(saving)
    assert clock.wait(LIMITS_S["saving"] + 500, {0: saving}) is None
    stall = clock.wait(10_000, {0: saving})
    assert stall is not None
    # Ten times as long would be hours; what is above the longest has an end.
    assert stall.seconds <= 0.5 * LIMITS_S["saving"] + 1500 + 10


def test_one_slow_step_of_many_is_normal_for_a_training_with_long_steps(clock: Clock) -> None:
    for _ in range(3):
        assert clock.wait(100, {0: clock.working(STEP)}) is None
    assert clock.wait(900, {0: clock.working(STEP)}) is None


def test_where_the_first_step_takes_long_the_second_may_too(clock: Clock) -> None:
    clock.wait(600, {0: replace(STEP, phase="first_step", step=-1, steps=0)})
    second = clock.working(STEP)
    assert clock.wait(1190, {0: second}) is None
    assert clock.wait(30, {0: second}) is not None


def test_after_a_restart_the_phase_gets_twice_the_time(clock: Clock) -> None:
    assert clock.wait(310, {0: STEP}) is not None
    new = replace(STEP, phase="starting", steps=0, watched=False, since=clock.now)
    clock.wait(2, {0: new})
    again = replace(clock.working(STEP), steps=1)
    assert clock.wait(LIMITS_S["step"] + 250, {0: again}) is None
    assert clock.wait(100, {0: again}) is not None


def test_a_stall_that_ended_in_a_restart_teaches_no_patience_beyond_that(clock: Clock) -> None:
    assert clock.wait(5 * LIMITS_S["step"], {0: STEP}) is not None
    clock.wait(1000, {0: STEP})
    clock.wait(2, {0: replace(STEP, phase="starting", steps=0, watched=False, since=clock.now)})
    assert clock.wait(700, {0: replace(clock.working(STEP), steps=1)}) is not None


@pytest.mark.parametrize("away_s", [3600.0, 500_000.0])
def test_a_job_that_was_suspended_with_its_agent_has_not_stalled(clock: Clock, away_s: float) -> None:
    assert clock.wait(5, {0: STEP}) is None
    clock.now += away_s
    assert clock.wait(200, {0: STEP}) is None


def test_a_persons_limit_holds_for_the_training_and_not_for_its_start() -> None:
    clock = Clock(Watchdog(2.0))
    assert clock.wait(100, {0: replace(STEP, phase="first_step", step=-1, steps=0)}) is None
    stall = clock.wait(5, {0: clock.working(STEP)})
    assert stall is not None
    assert (stall.limit_s, stall.phase) == (2.0, "step")
    first_batch = clock.working(replace(STEP, phase="data", step=-1, steps=0))
    assert clock.wait(LIMITS_S["data"] - 5, {0: first_batch}) is None
    longer = Clock(Watchdog(10_000.0))
    assert longer.wait(9000, {0: replace(STEP, phase="first_step")}) is None


def test_zero_is_no_watchdog() -> None:
    assert Clock(Watchdog(0)).wait(100_000, {0: STEP}) is None


def test_a_rank_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    assert clock.wait(10, {0: STEP, 1: clock.working(replace(STEP, phase="saving"))}) is None
    assert clock.wait(300, {0: STEP}) is not None


def test_no_ranks_no_stall(clock: Clock) -> None:
    assert clock.wait(1000, {}) is None
