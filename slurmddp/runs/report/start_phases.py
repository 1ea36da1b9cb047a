"""The phases of a start, from its launch to its first step, and how long each took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.report.timeline import whole_number
from slurmddp.runs.status.metrics import seconds_or_none


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase of one attempt, in their order.

    `launch` is the time that the ranks can't measure: set-up lines, srun, the start of the agent.
    """

    attempt: int
    seconds: Mapping[str, float]

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def newest_phases(events: Iterable[Any]) -> Phases | None:
    """Return the phases of the newest attempt; None before its first step, or if its program records none."""
    own: list[Mapping[str, Any]] = []
    newest: int | None = None
    for event in events:
        number = whole_number(event.get("attempt")) if isinstance(event, Mapping) else None
        if number is None or (newest is not None and number < newest):
            continue
        own, newest = (own if number == newest else []), number
        own.append(event)
    begun = next((event for event in own if event.get("event") == "started"), {})
    first = next((event for event in own if event.get("event") == "first_step"), {})
    measured = first.get("phases")
    if newest is None or not isinstance(measured, Mapping):
        return None
    numbers = {str(name): seconds_or_none(value) for name, value in measured.items()}
    seconds = {name: value for name, value in numbers.items() if value is not None}
    since, until = seconds_or_none(begun.get("time")), seconds_or_none(first.get("time"))
    if since is not None and until is not None:
        seconds = {"launch": round(max(0.0, until - since - sum(seconds.values())), 3), **seconds}
    return Phases(newest, seconds) if seconds else None
