"""Events that actions report while they run; the command line prints them.

An event that only one action reports is defined beside that action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """The action waits until another command or launcher releases a run or a folder."""

    name: str
    """Name of the run, or path of the folder."""
    reason: str
    """A sentence that names the command or launcher for which the action waits."""


@dataclass(frozen=True)
class HostGreeting:
    """Text that shells and profiles of a login node print before slurmddp runs on it."""

    text: str


@dataclass(frozen=True)
class HostOutput:
    """Output of the command that runs on a login node."""

    text: str


@dataclass(frozen=True)
class HostSilent:
    """A login node has not answered yet, and nothing was started."""

    host: str
    seconds: float
    """Time since the connection was opened."""


@dataclass(frozen=True)
class HostUnknown:
    """The state of the runs on a login node is unknown, because it does not answer."""

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
    """A warning: something is not done, or may not have the intended effect."""

    text: str


@dataclass(frozen=True)
class Info:
    """A sentence about a step or a finding of the action."""

    text: str


Report = Callable[[object], None]
"""Called with each event, in the order in which they happen."""


def ignore(event: object) -> None:
    """Report nothing."""
