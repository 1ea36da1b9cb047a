"""How long the parts of a start took: measured by every rank, written down by rank 0 with its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slurmddp.environments.present import IMPORTS_VARIABLE


class StartUp:
    """A stopwatch with one lap per phase, on the clock that nobody sets; a phase may have several laps."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._seconds = dict(_imports(environ))
        self._since = time.monotonic()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap, or since the stopwatch was made, as `phase`."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def seconds(self) -> dict[str, float]:
        """The length of each phase, in the order in which they began."""
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}


def _imports(environ: Mapping[str, str]) -> Mapping[str, float]:
    try:
        return {"imports": float(environ[IMPORTS_VARIABLE])}
    except (KeyError, ValueError):
        return {}  # Started by another launcher, where every rank imports for itself before this is loaded.
