"""Wait for the threads that run gloo's collectives, before a process of torch ends.

A collective returns before gloo's thread releases the tensors, for which the thread needs the interpreter
lock. If Python shuts down first, the process aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_IDLE_S = 10.0
"""Longest wait for gloo's threads, in seconds: on a busy host a thread may get no processor for a while."""
_IDLE_POLLS = 5
"""Number of polls in a row in which a thread must sleep before it counts as idle."""


def wait_until_idle() -> None:
    """Wait until gloo's threads have released the tensors of the last collective, at most `_IDLE_S`."""
    polls_asleep = 0
    deadline = time.monotonic() + _IDLE_S

    while polls_asleep < _IDLE_POLLS and time.monotonic() < deadline:
        # During time.sleep the threads can take the interpreter lock. A thread that sleeps even then (state
        # S) has nothing left to release.
        time.sleep(0.002)
        if set(_states()) <= {"S"}:
            polls_asleep += 1
        else:
            polls_asleep = 0


def _states() -> Iterator[str]:
    """Yield the kernel's state letter, such as S, of each gloo thread of this process."""
    for file in Path("/proc/self/task").glob("*/stat"):
        # The thread may have ended since the listing.
        with contextlib.suppress(OSError):
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            if name == _THREAD:
                yield rest.split()[0]
