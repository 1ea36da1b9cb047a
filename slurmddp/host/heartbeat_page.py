"""The page of memory into which a rank writes its heartbeat, without a lock, a system call or a wait.

The agent creates a page (a memfd) for each rank, which inherits its descriptor. A page outlives its rank, and
the next rank in its place gets the same page. All processes of a host share the clock, CLOCK_MONOTONIC.

Behind the page, the same memory holds the Python stacks of the rank and its loader workers
(`launchers/watchdog/stacks.py`). Stacks are not in a file, because they are needed when a file system hangs.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments.names import HEARTBEAT_VARIABLE
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

PHASES = ("starting", "meeting", "loading", "first_step", "data", "step", "evaluating", "saving", "ending")
"""The phases of a rank, in order.

A rank is `starting` after its fork, `meeting` in the rendezvous, `loading` while it builds the model and data
and loads the checkpoint. The later phases belong to the training.
"""

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""The signal that asks a process to write its Python stacks; sent only to processes that handle it."""
_NAME = "slurmddp-heartbeat"
_PAGE_BYTES = 4096
_PHASE, _STEP, _RESUMED, _STEPS, _WATCHED, _FINISHED, _EXIT_CODE = range(7)
_SINCE, _STEPPED, _STEP_S, _WAIT_S, _FORWARD_S = range(7, 12)
_HAS_ERROR = 12
_IS_LOST_RANK = 13
_TEXT = slice(1024, 2560)
_HINT = slice(2560, 4096)
"""Offsets in the page, for the text and the hint of the error that ends the rank; zeros fill the rest."""
_INDEX = {phase: index for index, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class RankHeartbeat:
    """The content of a rank's heartbeat page at one moment."""

    phase: str
    since: float
    """Monotonic time, in seconds, of the beginning of the phase or of the last heartbeat in it."""
    step: int
    """The last step that this rank has completed; -1 before the first step."""
    resumed: int
    """The step from which this rank resumed; 0 for a new training, -1 until it is known."""
    steps: int
    """Steps completed by this process."""
    stepped: float
    """Monotonic time, in seconds, at which the last step was completed; 0.0 before the first step."""
    step_s: float
    """Seconds of all completed steps together, including waits for data."""
    wait_s: float
    """Seconds of all waits for data together."""
    watched: bool = False
    """Whether the code that the rank runs at the moment writes heartbeats."""
    forward_s: float = 0.0
    """Seconds of all forward passes together; on a GPU estimated from a sample of the passes."""
    finished: bool = False
    """Whether a training that answers requests to stop has reached its end."""
    exit_code: int = 0
    """The exit code that replaces the 0 or 1 of the rank's interpreter; 0 if nothing replaces it."""


@dataclass(frozen=True)
class ReportedError:
    """The error that a rank has reported to its agent before it ended."""

    text: str
    """The message of the error; empty if the traceback in the log explains more."""
    hint: str
    """The advice to the person; empty if only the author of the program can give advice."""
    is_lost_rank: bool = False
    """Whether the rank failed only because it lost another rank."""


class HeartbeatPage:
    """A page of memory that a rank shares with its agent: the rank writes heartbeats, the agent reads it."""

    def __init__(self, descriptor: int) -> None:
        """Map the page of the file `descriptor` into memory; -1 creates a page that is not shared."""
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE_BYTES)
        # Each value is eight aligned bytes, so that a reader never sees a half-written value.
        self._counts = memoryview(self._page).cast("q")
        self._times = memoryview(self._page).cast("d")

    @classmethod
    def create(cls) -> HeartbeatPage:
        """Create a page for a rank that the agent will start."""
        # No flag MFD_CLOEXEC: the rank must inherit the descriptor under the same number.
        descriptor = os.memfd_create(_NAME, 0)
        os.ftruncate(descriptor, _PAGE_BYTES)
        page = cls(descriptor)
        page.forget_stacks()
        page.reset()
        return page

    @classmethod
    def attach(cls, environ: Mapping[str, str]) -> HeartbeatPage:
        """Return the page that the agent gave this process; without an agent, an unshared page."""
        return cls(descriptor_from(environ))

    def reset(self) -> None:
        """Clear the page for a rank that starts now."""
        self._page[:] = bytes(_PAGE_BYTES)
        self._counts[_STEP] = self._counts[_RESUMED] = -1
        self.enter("starting")

    def enter(self, phase: str) -> float:
        """Write to the page that `phase` begins or continues; return the monotonic time in seconds.

        Args:
            phase: one of PHASES.
        """
        now = time.monotonic()
        # The time comes first: a reader between the two writes must not see an old time in a new phase.
        self._times[_SINCE] = now
        self._counts[_PHASE] = _INDEX[phase]
        return now

    def watch(self, watched: bool) -> None:
        """Write to the page whether the code that the rank runs next writes heartbeats."""
        self._counts[_WATCHED] = watched

    def finish(self) -> None:
        """Write to the page that the training has reached its last step and was not stopped before."""
        self._counts[_FINISHED] = True

    def resumed(self, step: int) -> None:
        """Write to the page from which step the training resumes; 0 for a new training."""
        self._counts[_RESUMED] = step

    def completed(self, step: int, seconds: float, wait_s: float, forward_s: float = 0.0) -> None:
        """Write that a step is done, and add its times to the sums on the page.

        Args:
            step: the number of the step.
            seconds: the duration of the step.
            wait_s: seconds of the step in which the rank waited for data.
            forward_s: seconds of the forward passes of the step.
        """
        self._times[_STEP_S] += seconds
        self._times[_WAIT_S] += wait_s
        self._times[_FORWARD_S] += forward_s
        self._times[_STEPPED] = time.monotonic()
        self._counts[_STEPS] += 1
        self._counts[_STEP] = step

    def explain_exit(self, code: int) -> None:
        """Write the exit code with which the rank wants to end; the agent uses it in place of 0 or 1."""
        # The page is needed, because an uncaught exception always ends the interpreter with code 1.
        self._counts[_EXIT_CODE] = code

    def explained(self, code: int) -> int:
        """Return the exit code that the rank gave to `explain_exit`, if its interpreter exited with `code`.

        Return `code` itself if the rank gave no exit code, or if the interpreter would have replaced the
        rank's code by another code than `code`.
        """
        meant = self.read().exit_code
        replaced = EXIT_FINISHED if meant == EXIT_STOPPED else EXIT_FAILED
        if meant and code == replaced:
            return meant
        return code

    def report_error(self, error: ReportedError) -> None:
        """Write the error that ends the rank; texts that are too long for the page are cut off."""
        for place, text in ((_TEXT, error.text), (_HINT, error.hint)):
            size = place.stop - place.start
            self._page[place] = text.encode(errors="replace")[:size].ljust(size, b"\0")
        self._counts[_IS_LOST_RANK] = error.is_lost_rank

        # _HAS_ERROR is set last: if the rank is killed before, the agent ignores incomplete texts.
        self._counts[_HAS_ERROR] = True

    def reported_error(self) -> ReportedError | None:
        """Return the error that the rank reported; None if it reported none."""
        if not self._counts[_HAS_ERROR]:
            return None

        # errors="ignore", because a text may have been cut off inside a UTF-8 character.
        text, hint = (self._page[place].rstrip(b"\0").decode(errors="ignore") for place in (_TEXT, _HINT))
        return ReportedError(text, hint, bool(self._counts[_IS_LOST_RANK]))

    def read(self) -> RankHeartbeat:
        """Return the current content of the page."""
        counts = self._counts
        times = self._times
        return RankHeartbeat(
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
            finished=bool(counts[_FINISHED]),
            exit_code=counts[_EXIT_CODE],
        )

    def forget_stacks(self) -> None:
        """Delete the stacks behind the page; only the agent calls this, `stacks_bytes` and `stacks`."""
        os.ftruncate(self.descriptor, _PAGE_BYTES)
        os.lseek(self.descriptor, _PAGE_BYTES, os.SEEK_SET)

    def stacks_bytes(self) -> int:
        """Return the size in bytes of the stacks that are stored behind the page."""
        return os.fstat(self.descriptor).st_size - _PAGE_BYTES

    def stacks(self, begin: int, end: int) -> str:
        """Return the text of the stacks between two offsets in bytes, counted from the end of the page."""
        return os.pread(self.descriptor, end - begin, _PAGE_BYTES + begin).decode(errors="replace")

    def close(self) -> None:
        """Unmap the page and close its file; only the agent calls this, after the last rank has ended."""
        self._counts.release()
        self._times.release()
        self._page.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


def descriptor_from(environ: Mapping[str, str]) -> int:
    """Return the descriptor of the page that the agent gave this process; -1 if it gave none."""
    number = environ.get(HEARTBEAT_VARIABLE, "")
    if not number.isdecimal():
        return -1

    # The name of the file is checked: a program that a rank starts inherits the variable, but not the
    # descriptor, so the number may belong to another file.
    with suppress(OSError):
        name = str(Path(f"/proc/self/fd/{number}").readlink())
        if name.startswith(f"/memfd:{_NAME}"):
            return int(number)
    return -1


def arm_stacks(environ: Mapping[str, str]) -> None:
    """Register STACKS_SIGNAL: this process and its forks then write the stacks of all threads for the agent.

    Do nothing without an agent.
    """
    descriptor = descriptor_from(environ)
    if descriptor >= 0:
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
