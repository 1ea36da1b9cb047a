"""A run's ledger as the report shows it: one bar for the whole, and one for each attempt below it."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.runs.report.goodput import Ledger, Parts
from slurmddp.runs.table import duration, percent

ORDER = ("idle", "queued", "starting", "training", "saving", "lost", "ending", "untold")
"""From left to right, as they follow each other in an attempt."""
_MEANINGS = {
    "idle": "nobody had asked for more",
    "queued": "waiting for nodes",
    "starting": "until the first step was done",
    "training": "in steps that count",
    "saving": "training stood still",
    "lost": "in steps that had to be made again",
    "ending": "after the last step",
    "untold": "the program writes no first step",
}


@dataclass(frozen=True)
class Slice:
    """One word's part of a bar; `weight` is its share of the whole bar, from 0 to 1."""

    word: str
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
        """What a person hears who does not see the bar."""
        said = ", ".join(f"{one.word} {one.lasted} ({one.share})" for one in self.slices)
        return f"{self.title}, {self.lasted}: {said}"


@dataclass(frozen=True)
class TimeBars:
    """What the section is made of: the whole run, and its attempts where there are several."""

    whole: Bar
    attempts: tuple[Bar, ...] = ()


def time_bars(ledger: Ledger) -> TimeBars | None:
    """Return the bars of a ledger; None for one in which no time has passed."""
    if not ledger.whole:
        return None
    bars: tuple[Bar, ...] = ()
    if len(ledger.entries) > 1:
        longest = max(one.whole for one in ledger.entries)
        bars = tuple(
            _bar(_title(one.attempt), one.parts, one.whole, one.whole / longest)
            for one in ledger.entries
            if one.whole
        )
    return TimeBars(_bar("All of the time", ledger.parts, ledger.whole), bars)


def _title(attempt: int | None) -> str:
    return "Since then" if attempt is None else f"Attempt {attempt}"


def _bar(title: str, parts: Parts, whole: float, length: float = 1.0) -> Bar:
    known = [(word, parts[word]) for word in ORDER if parts.get(word)]
    slices = tuple(
        Slice(word, seconds / whole, duration(seconds), percent(seconds / whole), _MEANINGS[word])
        for word, seconds in known
    )
    return Bar(title, slices, duration(whole), length)
