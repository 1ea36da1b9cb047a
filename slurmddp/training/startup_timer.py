"""Measure the phases of a start; rank 0 records them with its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slurmddp.environments.names import IMPORTS_VARIABLE


class StartupTimer:
    """Stopwatch for the phases between the start of a rank and its first step."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        now = time.monotonic()
        self._seconds = dict(_seconds_before(environ, now))
        self._since = now

    def lap(self, phase: str) -> None:
        """Add the time since the last call, or since the start, to the phase `phase`."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, in the order in which the phases began."""
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}


def _seconds_before(environ: Mapping[str, str], now: float) -> Mapping[str, float]:
    """Return the seconds of the phases before this rank: the agent's "imports", and "fork" up to `now`.

    It is empty if no agent has imported torch for this rank.
    """
    try:
        imports_s, imported_at = map(float, environ[IMPORTS_VARIABLE].split())
    except (KeyError, ValueError):
        # The variable is missing or empty without an agent, where each rank imports torch itself.
        return {}

    return {"imports": imports_s, "fork": max(0.0, now - imported_at)}
