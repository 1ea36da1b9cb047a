"""The phases of a start, from its launch to its first step, and how long each took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.folder.history import of_newest_attempt
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
    newest, own = of_newest_attempt(events)
    begun = next((event for event in own if event.get("event") == "started"), {})
    first = next((event for event in own if event.get("event") == "first_step"), {})
    measured = first.get("phases")
    if not isinstance(measured, Mapping):
        return None
    numbers = {str(name): seconds_or_none(value) for name, value in measured.items()}
    seconds = {name: value for name, value in numbers.items() if value is not None}
    since, until = seconds_or_none(begun.get("time")), seconds_or_none(first.get("time"))
    if since is not None and until is not None:
        seconds = {"launch": round(max(0.0, until - since - sum(seconds.values())), 3), **seconds}
    return Phases(newest, seconds) if seconds else None
