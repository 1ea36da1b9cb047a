"""Events that an action reports while it runs; the command line prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """The action waits until another command or launcher releases a run."""

    run: str
    """Name of the run."""
    reason: str
    """A sentence that names the command or launcher that holds the run."""


Report = Callable[[object], None]
"""Called with each event, in the order in which they happen."""


def ignore(event: object) -> None:
    """Report nothing."""
