"""The exit guard ends a rank in time, tested with a clock and signals of the test."""

from __future__ import annotations

import pytest

from slurmddp.environments.time_limits import Limits
from slurmddp.training.stopping.exit_guard import PATIENCE_S, ExitGuard
from slurmddp.training.stopping.signals import StopSignals
from support.runs.agent_runs import wait_until


class Signals(StopSignals):
    """Signals that the test sends by hand."""

    def poll(self) -> str | None:
        return self.received

    def send(self, name: str) -> None:
        self.received = self.received or name
        self.terminated |= name == "SIGTERM"


class Watched:
    """An exit guard that polls only when the test says so."""

    def __init__(self, **limits: float) -> None:
        self.time = 1000.0
        self.said: list[str] = []
        self.signals = Signals()
        self.guard = ExitGuard(self.signals, Limits(**limits), now=lambda: self.time, leave=self.said.append)

    def after(self, seconds: float) -> list[str]:
        self.time += seconds
        self.guard.poll()
        return self.said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_before_the_training_a_signal_ends_the_rank(name: str) -> None:
    watched = Watched()
    assert watched.after(100) == []
    watched.signals.send(name)
    assert watched.after(0) == []
    (said,) = watched.after(PATIENCE_S)
    assert name in said and "nothing to save" in said


def test_a_training_that_has_begun_is_not_ended_without_a_kill_to_come() -> None:
    watched = Watched()
    watched.guard.begin()
    watched.signals.send("SIGTERM")
    assert watched.after(0) == watched.after(10_000) == []


def test_a_rank_that_is_about_to_be_killed_leaves() -> None:
    watched = Watched(kill_wait_s=30)
    watched.guard.begin()
    watched.signals.send("SIGTERM")
    assert watched.after(0) == watched.after(24) == []
    (said,) = watched.after(1)
    assert "25 s after SIGTERM" in said


def test_sigusr2_ends_no_rank_before_sigterm_comes() -> None:
    watched = Watched(kill_wait_s=30, end_time=1100)
    watched.guard.begin()
    watched.signals.send("SIGUSR2")
    assert watched.after(0) == watched.after(100) == []
    watched.signals.send("SIGTERM")
    assert watched.after(0) == watched.after(20) == []
    assert watched.after(5) != []


def test_a_training_that_has_begun_gets_the_time_of_each_poll() -> None:
    watched, times = Watched(), list[float]()
    watched.after(1)
    watched.guard.begin(times.append)
    watched.after(1)
    assert times == [1002.0]


def test_the_thread_polls_until_the_guard_is_closed() -> None:
    said: list[str] = []
    signals = Signals()
    with ExitGuard(signals, Limits(), leave=said.append) as guard:
        signals.send("SIGTERM")
        wait_until(lambda: said, "the thread polls")
        assert guard._thread.is_alive()
    assert said and not guard._thread.is_alive()
