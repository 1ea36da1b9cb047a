"""The page on which a rank shows its agent where it stands, written without a lock, a system call or a wait.

The agent makes one page per rank (a memfd) and hands it down by number, so a page outlives its rank and goes
to the one that takes its place. Each value is eight aligned bytes that one process writes and another reads,
so neither ever sees half of one. Times are of CLOCK_MONOTONIC, which all processes of a host share.

The same memory holds, behind the page, the Python stacks of the rank and its loader workers
(`launchers/watchdog/stacks.py`). No file takes them, because stacks are asked for where a file system hangs.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments.names import HEARTBEAT_VARIABLE

PHASES = ("starting", "meeting", "loading", "first_step", "data", "step", "evaluating", "saving", "ending")
"""What a rank can be in: from the fork; the rendezvous; model, data and checkpoint; then the training."""

_NAME = "slurmddp-pulse"
_PAGE_BYTES = 4096
_PHASE, _STEP, _RESUMED, _STEPS, _WATCHED = range(5)
_SINCE, _STEPPED, _STEP_S, _WAIT_S, _FORWARD_S = range(5, 10)
_INDEX = {phase: index for index, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Beat:
    """What a page shows at one moment."""

    phase: str
    since: float
    """When the phase began, or last gave a sign of life."""
    step: int
    """The last completed step; -1 before there is one, a resumed one included."""
    resumed: int
    """The step from which this rank went on, 0 for a beginning; -1 while it does not know."""
    steps: int
    """Steps completed by this process."""
    stepped: float
    """When the last step was completed; 0.0 before."""
    step_s: float
    """Seconds of all completed steps together, waiting for data included."""
    wait_s: float
    """Seconds of these that went by waiting for data."""
    watched: bool = False
    """Whether the rank shows signs of life in what it does now; code that knows no Pulse shows none."""
    forward_s: float = 0.0
    """Seconds of all forward passes together; on a GPU estimated from some of them."""


class Pulse:
    """One rank's page; the rank writes, the agent reads."""

    def __init__(self, descriptor: int | None) -> None:
        """Map the page behind `descriptor`; None gives a page that nobody else sees."""
        self.descriptor = descriptor
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, _PAGE_BYTES)
        self._counts = memoryview(self._page).cast("q")
        self._times = memoryview(self._page).cast("d")

    @classmethod
    def create(cls) -> Pulse:
        """Return a new page for one rank; its descriptor is to be inherited by number."""
        descriptor = os.memfd_create(_NAME, 0)
        os.ftruncate(descriptor, _PAGE_BYTES)
        os.lseek(descriptor, _PAGE_BYTES, os.SEEK_SET)
        pulse = cls(descriptor)
        pulse.reset()
        return pulse

    @classmethod
    def attach(cls, environ: Mapping[str, str]) -> Pulse:
        """Return the page that the agent gave this process, or one that nobody reads."""
        return cls(descriptor_from(environ))

    def reset(self) -> None:
        """Make the page that of a rank which starts now."""
        self._page[:] = bytes(_PAGE_BYTES)
        self._counts[_STEP] = self._counts[_RESUMED] = -1
        self.enter("starting")

    def enter(self, phase: str) -> float:
        """Show that `phase`, one of PHASES, begins now, or that it gets on; return the time."""
        now = time.monotonic()
        self._times[_SINCE] = now
        self._counts[_PHASE] = _INDEX[phase]
        return now

    def watch(self, watched: bool) -> None:
        """Say whether signs of life are to be expected from here on."""
        self._counts[_WATCHED] = watched

    def resumed(self, step: int) -> None:
        """Show from which step the training goes on; 0 for a beginning."""
        self._counts[_RESUMED] = step

    def completed(self, step: int, seconds: float, wait_s: float) -> None:
        """Show that `step` is done, took `seconds`, and waited `wait_s` of them for data."""
        self._times[_STEP_S] += seconds
        self._times[_WAIT_S] += wait_s
        self._times[_STEPPED] = time.monotonic()
        self._counts[_STEPS] += 1
        self._counts[_STEP] = step

    def forward(self, seconds: float) -> None:
        """Show that forward passes took `seconds`."""
        self._times[_FORWARD_S] += seconds

    def read(self) -> Beat:
        """Return what the page shows now."""
        counts, times = self._counts, self._times
        return Beat(
            phase=PHASES[counts[_PHASE]],
            since=times[_SINCE],
            step=counts[_STEP],
            resumed=counts[_RESUMED],
            steps=counts[_STEPS],
            stepped=times[_STEPPED],
            step_s=times[_STEP_S],
            wait_s=times[_WAIT_S],
            watched=bool(counts[_WATCHED]),
            forward_s=times[_FORWARD_S],
        )

    def forget_stacks(self) -> None:
        """Make room for new stacks behind the page; the agent's alone."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, _PAGE_BYTES)
            os.lseek(self.descriptor, _PAGE_BYTES, os.SEEK_SET)

    def stacks_bytes(self) -> int:
        """Return how much lies behind the page."""
        return 0 if self.descriptor is None else os.fstat(self.descriptor).st_size - _PAGE_BYTES

    def stacks(self, begin: int, end: int) -> str:
        """Return what lies behind the page between two places in it."""
        if self.descriptor is None:
            return ""
        return os.pread(self.descriptor, end - begin, _PAGE_BYTES + begin).decode(errors="replace")

    def close(self) -> None:
        """Give the page back; the agent's alone, once its rank is gone for good."""
        self._counts.release()
        self._times.release()
        self._page.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


def descriptor_from(environ: Mapping[str, str]) -> int | None:
    """Return the descriptor of the page that the agent gave this process, if this is the process.

    A program that a rank starts inherits the variable, but under that number has something else or nothing.
    """
    number = environ.get(HEARTBEAT_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        name = str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:
        return None
    return int(number) if name.startswith(f"/memfd:{_NAME}") else None
