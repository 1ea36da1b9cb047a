"""What happened in a run's newest attempt and is worth a line although it goes on: stalls, slow ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_DOING = {"data": "waiting for data", "step": "in its step", "first_step": "in its first step"}


def stall_text(event: Mapping[str, Any]) -> str:
    """Say who stood still, in what, and for how long."""
    doing = _DOING.get(event.get("phase", ""), event.get("phase", "somewhere"))
    return (
        f"rank {event.get('rank')} on {event.get('host')} stood still for {event.get('seconds', 0):.0f} s, "
        f"{doing}, after step {event.get('step')}"
    )


def notices(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the newest attempt's last stall, and for each of its ranks that was slow."""
    of_attempts = [event for event in events if isinstance(event.get("attempt"), int)]
    newest = max((event["attempt"] for event in of_attempts), default=0)
    own = [event for event in of_attempts if event["attempt"] == newest]
    stalls = [event for event in own if event.get("event") == "stalled"]
    if stalls:
        more = f" (and {len(stalls) - 1} before)" if len(stalls) > 1 else ""
        yield "stalled", stall_text(stalls[-1]) + more
    for event in own:
        if event.get("event") == "straggler":
            yield "slow", str(event.get("text", ""))
