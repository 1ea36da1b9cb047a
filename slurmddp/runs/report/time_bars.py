"""The time of a run as the report draws it: one bar for the whole, and one bar for each attempt."""

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
"""From left to right, in the order of an attempt."""


@dataclass(frozen=True)
class Slice:
    """One kind of time in a bar; `weight` is its share of the bar, from 0 to 1."""

    kind: str
    weight: float
    lasted: str
    share: str
    meaning: str


@dataclass(frozen=True)
class Bar:
    """One bar; `length` is its share of the longest, from 0 to 1."""

    title: str
    slices: tuple[Slice, ...]
    lasted: str
    length: float = 1.0

    @property
    def label(self) -> str:
        """The bar in words, for a screen reader."""
        said = ", ".join(f"{one.kind} {one.lasted} ({one.share})" for one in self.slices)
        return f"{self.title}, {self.lasted}: {said}"


def time_bars(goodput: Goodput) -> list[Bar]:
    """Return the bar of the whole run, then of its attempts if there are several; empty if no time passed."""
    if not goodput.whole:
        return []
    bars = [_bar("All of the time", goodput.parts, goodput.whole)]
    if len(goodput.attempts) > 1:
        longest = max(one.whole for one in goodput.attempts)
        bars += [
            _bar(_title(one.attempt), one.parts, one.whole, one.whole / longest)
            for one in goodput.attempts
            if one.whole
        ]
    return bars


def _title(attempt: int | None) -> str:
    return "Since then" if attempt is None else f"Attempt {attempt}"


def _bar(title: str, parts: Parts, whole: float, length: float = 1.0) -> Bar:
    slices = tuple(
        Slice(
            kind,
            parts[kind] / whole,
            duration(parts[kind]) if round(parts[kind]) else "< 1s",
            percent(parts[kind] / whole),
            meaning,
        )
        for kind, meaning in _MEANINGS.items()
        if parts.get(kind)
    )
    return Bar(title, slices, duration(whole), length)
