"""How long the parts of an attempt's start took, from what rank 0 wrote with its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.report.timeline import moment_of, whole_number


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase of one attempt, in their order.

    `launch` is what the ranks don't see: set-up lines, srun, the interpreter of the agent.
    """

    attempt: int
    seconds: Mapping[str, float]

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def newest_phases(events: Iterable[Any]) -> Phases | None:
    """Return the phases of the newest attempt; None before its first step, or if its program tells none."""
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
    told = first.get("phases")
    if newest is None or not isinstance(told, Mapping):
        return None
    seconds = {str(name): value for name in told if (value := moment_of(told[name])) is not None}
    since, until = moment_of(begun.get("time")), moment_of(first.get("time"))
    if since is not None and until is not None:
        seconds = {"launch": round(max(0.0, until - since - sum(seconds.values())), 3), **seconds}
    return Phases(newest, seconds) if seconds else None
