"""The threads that run gloo's collectives in a process of torch, and how a process ends after them.

A collective returns before gloo's thread releases the tensors, for which the thread needs the interpreter
lock. If Python shuts down first, the process aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_IDLE_S = 1.0
"""Most seconds to wait until gloo's threads are idle."""
_IDLE_POLLS = 5
"""Polls in a row that must find a thread asleep before it counts as idle."""


def wait_until_idle() -> None:
    """Return once gloo's threads have released the tensors of the last collective, or after a second.

    A thread that sleeps while this thread has released the interpreter lock has nothing left to release.
    """
    polls_asleep = 0
    deadline = time.monotonic() + _IDLE_S
    while polls_asleep < _IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(0.002)  # Release the interpreter lock.
        polls_asleep = polls_asleep + 1 if set(_states()) <= {"S"} else 0


def _states() -> Iterator[str]:
    """Yield the kernel's state letter of each thread of gloo; on Linux only."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # The thread has ended meanwhile.
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            if name == _THREAD:
                yield rest.split()[0]
