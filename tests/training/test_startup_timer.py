"""The phases of a start: laps on a clock that only goes forward."""

from __future__ import annotations

import pytest

from slurmddp.training import startup_timer
from slurmddp.training.startup_timer import StartupTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(startup_timer.time, "monotonic", lambda: now[0])
    return now


def test_each_lap_counts_the_time_since_the_last_lap(clock: list[float]) -> None:
    started = StartupTimer({"SLURMDDP_IMPORTS_S": "2.5 99.875"})
    for phase, seconds in [("rendezvous", 0.25), ("data", 1.0), ("model", 0.5), ("data", 2.0)]:
        clock[0] += seconds
        started.lap(phase)
    phases = [("imports", 2.5), ("fork", 0.125), ("rendezvous", 0.25), ("data", 3.0), ("model", 0.5)]
    assert list(started.seconds.items()) == phases


@pytest.mark.parametrize("environ", [{}, {"SLURMDDP_IMPORTS_S": "long"}, {"SLURMDDP_IMPORTS_S": "2.5"}])
def test_without_an_agent_the_phases_start_without_imports(
    clock: list[float], environ: dict[str, str]
) -> None:
    started = StartupTimer(environ)
    started.lap("rendezvous")
    assert started.seconds == {"rendezvous": 0.0}
