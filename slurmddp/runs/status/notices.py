"""Find notices about the newest attempt of a run: hangs, slow ranks, restarts on other nodes, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slurmddp.runs.folder.history import of_newest_attempt, restart_count

_DOING = {"data": "waiting for data", "step": "in its step", "first_step": "in its first step"}

_WARNINGS = 5


@dataclass(frozen=True)
class Notice:
    """A sentence that `slurmddp status` shows about something unusual in a run's newest attempt."""

    kind: Literal["stalled", "slow", "places", "warned"]
    """stalled: a rank hangs. slow: a rank is slower than the others. places: ranks have restarted on other
    nodes. warned: the attempt has recorded a warning."""
    text: str


def notices(events: Iterable[Mapping[str, Any]]) -> Iterator[Notice]:
    """Yield notices about the newest attempt: a hang, slow ranks, restarts on other nodes, and warnings.

    A hang is yielded only while the ranks are being ended; after that, it is a failure. Of the warnings, the
    last `_WARNINGS` different ones are yielded.
    """
    _, newest = of_newest_attempt(events)
    ends = [event for event in newest if event.get("event") in ("stalled", "rank_failed", "ended")]
    if ends and ends[-1]["event"] == "stalled":
        yield Notice("stalled", _stall_text(ends[-1]))

    for event in newest:
        if event.get("event") == "straggler":
            yield Notice("slow", str(event.get("text", "")))
        elif event.get("event") == "restarted":
            places = other_places(event)
            if places:
                yield Notice("places", f"after restart {restart_count(event)}, the ranks run {places}")

    # A dict removes repeated warnings and keeps the order of their first occurrences.
    warnings = dict.fromkeys(str(event.get("text", "")) for event in newest if event.get("event") == "warned")
    yield from (Notice("warned", text) for text in list(warnings)[-_WARNINGS:])


def other_places(event: Mapping[str, Any]) -> str:
    """Return on which other nodes ranks have restarted, such as "on 2 nodes"; empty for the same nodes."""
    phrases = []
    spare = event.get("spare")
    if spare:
        phrases.append(f"with spare node{'s' * (len(spare) > 1)} {', '.join(map(str, spare))}")
    nodes = event.get("nodes")
    if nodes:
        phrases.append(f"on {nodes} node{'s' * (nodes > 1)}")
    return " ".join(phrases)


def _stall_text(event: Mapping[str, Any]) -> str:
    """Return a sentence that says which rank hangs, in which phase, and for how long."""
    doing = _DOING.get(event.get("phase", ""), event.get("phase", "somewhere"))
    return (
        f"rank {event.get('rank')} on {event.get('host')} made no progress for "
        f"{event.get('seconds', 0):.0f} s, {doing}, after step {event.get('step')}; the ranks are being ended"
    )
