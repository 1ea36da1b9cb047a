"""When a node's ranks have come to a standstill, and when they have not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.watchdog.hang import LIMITS_S, Watchdog

STEP = RankHeartbeat("step", 100.0, 7, 0, 7, 100.0, 7.0, 0.0, watched=True)


class Clock:
    """Polls once a second, as the agent does."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.watchdog, self.now = Watchdog(timeout_s), 100.0

    def wait(self, seconds: float, beats: dict[int, RankHeartbeat]) -> float | None:
        """Return after how many of the `seconds`, in which nothing changes, a hang is reported."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += 1.0
            if self.watchdog.poll(beats, self.now):
                return self.now - begin
        return None

    def working(self, beat: RankHeartbeat) -> RankHeartbeat:
        return replace(beat, since=self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_that_never_ends_is_found_once_it_has_had_its_time(clock: Clock) -> None:
    beats = {0: STEP, 1: replace(STEP, phase="data", since=101.0)}
    assert clock.wait(LIMITS_S["data"] - 5, beats) is None
    assert clock.wait(60, beats)


def test_it_is_told_again_but_not_at_every_look(clock: Clock) -> None:
    assert clock.wait(400, {0: STEP})
    assert clock.wait(60, {0: STEP}) is None
    assert clock.wait(60, {0: STEP})


def test_nobody_stalls_while_one_shows_signs_of_life(clock: Clock) -> None:
    for _ in range(40):
        at_work = clock.working(replace(STEP, phase="evaluating"))
        assert clock.wait(60, {0: at_work, 1: STEP}) is None


@pytest.mark.parametrize(
    ("timeout_s", "beats"),
    [
        (None, {}),
        (None, {0: replace(STEP, watched=False), 1: STEP}),
        (None, {0: replace(STEP, phase="starting")}),
        (0, {0: STEP}),
    ],
    ids=["no ranks", "no signs", "starting", "switched off"],
)
def test_what_can_not_be_judged_never_hangs(timeout_s: float | None, beats: dict[int, RankHeartbeat]) -> None:
    assert Clock(timeout_s).wait(100_000, beats) is None


def test_what_took_long_and_went_well_may_take_longer(clock: Clock) -> None:
    saving = replace(STEP, phase="saving")
    clock.wait(0.5 * LIMITS_S["saving"], {0: saving})
    clock.wait(1, {0: clock.working(STEP)})
    # Ten times as long would be hours; what is above the longest has an end.
    waited = clock.wait(12_000, {0: clock.working(saving)})
    assert waited is not None
    assert LIMITS_S["saving"] + 500 < waited <= 0.5 * LIMITS_S["saving"] + 1500 + 10


def test_one_slow_step_of_many_is_normal_for_a_training_with_long_steps(clock: Clock) -> None:
    for _ in range(3):
        assert clock.wait(100, {0: clock.working(STEP)}) is None
    assert clock.wait(900, {0: clock.working(STEP)}) is None


def test_where_the_first_step_takes_long_the_second_may_too(clock: Clock) -> None:
    clock.wait(600, {0: replace(STEP, phase="first_step", step=-1, steps=0)})
    waited = clock.wait(1300, {0: clock.working(STEP)})
    assert waited is not None and 1190 < waited < 1220


@pytest.mark.parametrize("silent_s", [310, 2500], ids=["once reported", "many times"])
def test_after_a_restart_the_phase_gets_twice_the_time(clock: Clock, silent_s: float) -> None:
    begin = clock.now
    while clock.now < begin + silent_s:
        clock.wait(begin + silent_s - clock.now, {0: STEP})
    clock.wait(2, {0: replace(STEP, phase="starting", steps=0, watched=False, since=clock.now)})
    waited = clock.wait(700, {0: replace(clock.working(STEP), steps=1)})
    assert waited is not None and LIMITS_S["step"] + 250 < waited < LIMITS_S["step"] + 350


@pytest.mark.parametrize("away_s", [3600.0, 500_000.0])
def test_a_job_that_was_suspended_with_its_agent_has_not_stalled(clock: Clock, away_s: float) -> None:
    assert clock.wait(5, {0: STEP}) is None
    clock.now += away_s
    assert clock.wait(200, {0: STEP}) is None


@pytest.mark.parametrize(
    ("timeout_s", "beat", "quiet_s", "found_s"),
    [
        (2.0, STEP, 1, 5),
        (2.0, replace(STEP, phase="first_step", step=-1, steps=0), 100, 2000),
        (2.0, replace(STEP, phase="data", step=-1, steps=0), LIMITS_S["data"] - 5, LIMITS_S["data"] + 5),
        (10_000.0, replace(STEP, phase="first_step"), 9000, 10_010),
    ],
    ids=["step", "first step", "first batch", "longer than usual"],
)
def test_a_persons_limit_holds_for_the_training_and_not_for_its_start(
    timeout_s: float, beat: RankHeartbeat, quiet_s: float, found_s: float
) -> None:
    waited = Clock(timeout_s).wait(found_s, {0: beat})
    assert waited is not None and waited > quiet_s


def test_a_rank_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    assert clock.wait(10, {0: STEP, 1: clock.working(replace(STEP, phase="saving"))}) is None
    assert clock.wait(300, {0: STEP})
