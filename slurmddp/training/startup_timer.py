"""How long the parts of a start took: measured by every rank, written down by rank 0 with its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slurmddp.environments.names import IMPORTS_VARIABLE


class StartupTimer:
    """A stopwatch with one lap per phase, on the clock that nobody sets; a phase may have several laps."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        now = time.monotonic()
        self._seconds = dict(_before(environ, now))
        self._since = now

    def lap(self, phase: str) -> None:
        """Count the time since the last lap, or since the stopwatch was made, as `phase`."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def seconds(self) -> dict[str, float]:
        """The length of each phase, in the order in which they began."""
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}


def _before(environ: Mapping[str, str], now: float) -> Mapping[str, float]:
    """Return what the agent says of the time before: until it could start ranks, and from then to `now`."""
    try:
        imports, ready = map(float, environ[IMPORTS_VARIABLE].split())
    except (KeyError, ValueError):
        return {}  # Started by another launcher, where every rank imports for itself before this is loaded.
    return {"imports": imports, "fork": max(0.0, now - ready)}
