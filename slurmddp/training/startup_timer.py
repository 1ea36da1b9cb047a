"""Measure the phases of a start; rank 0 records them with its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slurmddp.environments.names import IMPORTS_VARIABLE


class StartupTimer:
    """Stopwatch on the monotonic clock, with one or more laps per phase."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        now = time.monotonic()
        self._seconds = dict(_seconds_before(environ, now))
        self._since = now

    def lap(self, phase: str) -> None:
        """Count the time since the last lap, or since the start, as `phase`."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, in the order of the first laps."""
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}


def _seconds_before(environ: Mapping[str, str], now: float) -> Mapping[str, float]:
    """Return the seconds of the agent's imports, and the seconds from their end to `now`."""
    try:
        imports_s, imported_at = map(float, environ[IMPORTS_VARIABLE].split())
    except (KeyError, ValueError):
        # Under another launcher each rank imports torch itself, before this module.
        return {}

    return {"imports": imports_s, "fork": max(0.0, now - imported_at)}
