"""The phases of a start, from the launch to the first step, and how long each took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.folder.history import of_newest_attempt
from slurmddp.runs.status.metrics import seconds_or_none


@dataclass(frozen=True)
class Phases:
    """The seconds of each phase of an attempt until its first step was done, in order.

    The phase `launch` is the time before the ranks exist: setup lines, srun, and the start of the agent. The
    ranks can't measure it, so it is the remainder of the time since the `started` event.
    """

    attempt: int
    seconds: Mapping[str, float]

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def newest_phases(events: Iterable[Any]) -> Phases | None:
    """Return the phases of the newest attempt; None before its first step, or if no phases are recorded."""
    newest, attempt_events = of_newest_attempt(events)
    started = next((event for event in attempt_events if event.get("event") == "started"), {})
    first_step = next((event for event in attempt_events if event.get("event") == "first_step"), {})
    measured = first_step.get("phases")
    if not isinstance(measured, Mapping):
        return None

    numbers = {str(name): seconds_or_none(value) for name, value in measured.items()}
    seconds = {name: value for name, value in numbers.items() if value is not None}

    began = seconds_or_none(started.get("time"))
    ended = seconds_or_none(first_step.get("time"))
    if began is not None and ended is not None:
        seconds = {"launch": round(max(0.0, ended - began - sum(seconds.values())), 3), **seconds}
    if not seconds:
        return None
    return Phases(newest, seconds)
