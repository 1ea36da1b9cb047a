"""The time of a run as bars of the report: a bar for the whole run, and a bar for each attempt."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.runs.report.goodput import Goodput, Parts
from slurmddp.runs.text_format import duration, percent

_MEANINGS = {
    "idle": "nothing was submitted",
    "queued": "waiting for nodes",
    "starting": "until the first step was done",
    "training": "in steps that count",
    "saving": "training paused",
    "lost": "in steps that no checkpoint holds, or without a step",
    "ending": "after the last step",
    "unknown": "the program records no steps",
}
"""The kinds of time from left to right, in the order in which they occur in an attempt."""


@dataclass(frozen=True)
class Slice:
    """A segment of a bar: one kind of time; `weight` is its fraction of the bar, from 0 to 1."""

    kind: str
    weight: float
    lasted: str
    share: str
    meaning: str


@dataclass(frozen=True)
class Bar:
    """A bar of segments for the time of a run or of an attempt.

    `length` is its length relative to the longest bar, from 0 to 1.
    """

    title: str
    slices: tuple[Slice, ...]
    lasted: str
    length: float = 1.0

    @property
    def label(self) -> str:
        """A description of the bar for screen readers."""
        parts = ", ".join(f"{part.kind} {part.lasted} ({part.share})" for part in self.slices)
        return f"{self.title}, {self.lasted}: {parts}"


def time_bars(goodput: Goodput) -> list[Bar]:
    """Return a bar for the run and, if it has several attempts, a bar for each of them.

    The list is empty if no time has passed.
    """
    if not goodput.whole:
        return []

    bars = [_bar("All of the time", goodput.parts, goodput.whole)]
    if len(goodput.attempts) < 2:
        return bars

    longest = max(attempt.whole for attempt in goodput.attempts)
    bars += [
        _bar(_title(attempt.attempt), attempt.parts, attempt.whole, attempt.whole / longest)
        for attempt in goodput.attempts
        if attempt.whole
    ]
    return bars


def _title(attempt: int | None) -> str:
    return "Since then" if attempt is None else f"Attempt {attempt}"


def _bar(title: str, parts: Parts, whole: float, length: float = 1.0) -> Bar:
    slices: list[Slice] = []
    for kind, meaning in _MEANINGS.items():
        seconds = parts.get(kind)
        if seconds:
            lasted = duration(seconds) if round(seconds) else "< 1s"
            share = seconds / whole
            slices.append(Slice(kind, share, lasted, percent(share), meaning))

    return Bar(title, tuple(slices), duration(whole), length)
