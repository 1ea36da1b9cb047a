"""Define the events that actions report while they run; the command line prints them.

An event that only one action reports is defined beside that action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """An action waits until another command or launcher releases the lock of a run or a folder."""

    name: str
    """Name of the run, or path of the folder."""
    reason: str
    """A sentence that names the command or launcher for which the action waits."""


@dataclass(frozen=True)
class HostGreeting:
    """Text that the shell of a login node and its profiles print before slurmddp runs there."""

    text: str


@dataclass(frozen=True)
class HostOutput:
    """Output of a slurmddp command that runs on a login node over ssh."""

    text: str


@dataclass(frozen=True)
class HostSilent:
    """A login node has not answered yet, and nothing was started."""

    host: str
    seconds: float
    """Seconds since the connection was opened."""


@dataclass(frozen=True)
class HostUnknown:
    """A login node does not answer, so the state of its runs is unknown."""

    host: str
    reason: str


@dataclass(frozen=True)
class CodeSent:
    """The code of a project has arrived on a login node."""

    host: str
    folder: str
    files: int
    """Number of files of the project."""
    left_out: tuple[str, ...]
    """Names of files and folders that may hold passwords or keys, and stayed on this machine."""


@dataclass(frozen=True)
class Note:
    """A warning, for example that a setting has no effect or that SLURM may never start a job."""

    text: str


@dataclass(frozen=True)
class Info:
    """A sentence for a person about the work or the findings of an action; it is no warning."""

    text: str


Report = Callable[[object], None]
"""A function that an action calls with each event, in the order of the events."""


def ignore(event: object) -> None:
    """Discard an event; the default of `report` arguments."""
