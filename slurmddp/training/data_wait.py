"""A wait for data that a stop can end: a file system that hangs must not keep the job from its checkpoint.

What a rank is about to compute on a batch is held while it waits for the batch: it counts as not begun, so
that ranks that all wait for the same storage agree to stop before it. Where another rank has its batch
already, this rank has to follow it and waits on. Data that loader workers read is looked for ten times a
second. A rank that reads its data itself (`workers=0`) looks up between two samples; one sample can't be
interrupted (another thread can't read in the rank's place: data sets may hold what only works in the thread
that made it), so one that never comes ends with the guard's exit before the kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

_LOOK_S = 0.1


class StoppedWaiting(Exception):
    """All ranks stop before computing on the batch that was asked for, which counts as never handed out."""


class Pause(Protocol):
    """What a waiting rank asks: `StopPoll` has it."""

    waits_for_step: bool
    """Whether it is a batch before which all ranks can stop that is waited for now."""

    def hold(self) -> None: ...
    def release(self) -> bool: ...
    def is_over(self) -> bool: ...


def interruptible(batches: Iterator[Any], pause: Pause) -> Iterator[Any]:
    """Let the waits of a DataLoader's iterator end by StoppedWaiting; torch has no public way to do so."""
    if hasattr(batches, "_try_get_data"):
        return _workers_interruptible(batches, pause)
    if hasattr(batches, "_next_data") and hasattr(batches, "_dataset_fetcher"):
        return _reading_interruptible(batches, pause)
    return batches


def _workers_interruptible(batches: Any, pause: Pause) -> Iterator[Any]:
    fetch = batches._try_get_data
    if hasattr(fetch, "interruptible"):
        return batches  # type: ignore[no-any-return]

    def attempt(timeout: float = 5.0) -> tuple[bool, Any]:
        if not pause.waits_for_step:
            return fetch(timeout)  # type: ignore[no-any-return]
        pause.hold()
        success, data, left = False, None, timeout
        while not success and left > 0 and not pause.is_over():
            success, data = fetch(min(_LOOK_S, left))
            left -= _LOOK_S
        if (success or pause.is_over()) and not pause.release():
            for worker in batches._workers:
                worker.terminate()  # else each would be waited for, five seconds long
            raise StoppedWaiting
        return success, data

    attempt.interruptible = True  # type: ignore[attr-defined]
    batches._try_get_data = attempt
    return batches  # type: ignore[no-any-return]


def _reading_interruptible(batches: Any, pause: Pause) -> Iterator[Any]:
    """Do so for an iterator whose process reads the samples itself."""
    fetcher, read = batches._dataset_fetcher, batches._next_data

    def look() -> None:
        if pause.is_over() and not pause.release():
            raise StoppedWaiting

    def attempt() -> Any:
        if not pause.waits_for_step:
            return read()
        pause.hold()
        data = read()
        if not pause.release():
            raise StoppedWaiting
        return data

    if hasattr(fetcher, "dataset_iter"):
        fetcher.dataset_iter = _between(fetcher.dataset_iter, look)
    else:
        fetcher.dataset = _LooksUp(fetcher.dataset, look)
    batches._next_data = attempt
    return batches  # type: ignore[no-any-return]


def _between(samples: Iterator[Any], look: Callable[[], None]) -> Iterator[Any]:
    for sample in samples:
        yield sample
        look()


class _LooksUp:
    """Reads samples of `inner` with a look before each; those that `inner` reads by the batch are one."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        self._inner, self._look = inner, look

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return self._inner[key]

    def __getitems__(self, keys: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any]
        if hasattr(type(self._inner), "look_and_read"):  # SeededSamples, which this module does without
            found = self._inner.look_and_read(keys, self._look)
        elif hasattr(self._inner, "__getitems__"):
            found = self._inner.__getitems__(keys)
        else:
            found = [self[key] for key in keys]
        return found
