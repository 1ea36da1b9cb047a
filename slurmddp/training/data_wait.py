"""A wait for data that a stop can end: a file system that hangs must not keep the job from its checkpoint.

The step that waits for its first batch is held: it counts as not begun, so that ranks that all wait for the
same storage agree to stop before it. Where another rank has gone into that step already, this rank has to
follow it and waits on. It works for data that loader workers read; what a rank reads itself (`workers=0`)
can't be interrupted, and ends with the guard's exit before the kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

_LOOK_S = 0.1


class StoppedWaiting(Exception):
    """All ranks stop before the step whose first batch was being waited for; the data was not touched."""


class Pause(Protocol):
    """What a waiting rank asks: `StopPoll` has it."""

    waits_for_step: bool
    """Whether it is the first batch of a step that is waited for now."""

    def hold(self) -> None: ...
    def release(self) -> bool: ...
    def is_over(self) -> bool: ...


def interruptible(batches: Iterator[Any], pause: Pause) -> Iterator[Any]:
    """Let the waits of a DataLoader's iterator end by StoppedWaiting; torch has no public way to do so."""
    fetch = getattr(batches, "_try_get_data", None)
    if fetch is None or hasattr(fetch, "interruptible"):
        return batches

    def attempt(timeout: float = 5.0) -> tuple[bool, Any]:
        if not pause.waits_for_step:
            return fetch(timeout)  # type: ignore[no-any-return]
        pause.hold()
        success, data, left = False, None, timeout
        while not success and left > 0 and not pause.is_over():
            success, data = fetch(min(_LOOK_S, left))
            left -= _LOOK_S
        if (success or pause.is_over()) and not pause.release():
            for worker in getattr(batches, "_workers", ()):
                worker.terminate()  # else each would be waited for, five seconds long
            raise StoppedWaiting
        return success, data

    attempt.interruptible = True  # type: ignore[attr-defined]
    batches._try_get_data = attempt  # type: ignore[attr-defined]
    return batches
