"""The exit guard ends a rank in time, tested with a clock and signals of the test."""

from __future__ import annotations

import pytest

from slurmddp.environments.time_limits import TimeLimits
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


@pytest.mark.parametrize(
    ("limits", "has_begun", "polls", "said"),
    [
        ({}, False, [(100, ""), (0, "SIGTERM"), (PATIENCE_S, "")], "SIGTERM came before the training began"),
        ({}, False, [(100, ""), (0, "SIGUSR2"), (PATIENCE_S, "")], "SIGUSR2 came before the training began"),
        ({}, True, [(0, "SIGTERM"), (10_000, "")], ""),
        ({"kill_wait_s": 30}, True, [(0, "SIGTERM"), (24, ""), (1, "")], "25 s after SIGTERM"),
        (
            {"kill_wait_s": 30, "end_time": 1100},
            True,
            [(0, "SIGUSR2"), (100, ""), (0, "SIGTERM"), (20, ""), (5, "")],
            "25 s after SIGTERM",
        ),
    ],
    ids=["before the training", "by SIGUSR2", "no kill to come", "about to be killed", "late"],
)
def test_a_rank_leaves_at_the_last_poll_or_stays(
    limits: dict[str, float], has_begun: bool, polls: list[tuple[float, str]], said: str
) -> None:
    """Each poll comes some seconds after the one before, and some after a signal."""
    now, signals, leaves = 1000.0, Signals(), list[str]()
    times, seen = list[float](), list[float]()
    guard = ExitGuard(signals, TimeLimits(**limits), now=lambda: now, leave=leaves.append)
    if has_begun:
        guard.begin(seen.append)
    for seconds, name in polls:
        assert leaves == []
        now += seconds
        if name:
            signals.send(name)
        times.append(now)
        guard.poll()
    assert [text[: len(said)] for text in leaves] == [said] * bool(said)
    assert seen == (times[: len(polls) - len(leaves)] if has_begun else []), "a training gets the time"


def test_the_thread_polls_until_the_guard_is_closed() -> None:
    said: list[str] = []
    signals = Signals()
    with ExitGuard(signals, TimeLimits(), leave=said.append) as guard:
        signals.send("SIGTERM")
        wait_until(lambda: said, "the thread polls")
        assert guard._thread.is_alive()
    assert said and not guard._thread.is_alive()
