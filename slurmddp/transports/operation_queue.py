"""Run a process group's operations one by one in the order of the calls, in a thread or in the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from slurmddp.errors import RankFailure

T = TypeVar("T")

_NONE = timedelta()
"""torch passes this time-out if the caller gives none: the group's time-out holds."""
_END_S = 1.0
"""The longest wait for the thread at the end of a group."""


def call_link(call: Callable[[], T]) -> T:
    """Return the result of a call that uses a link; raise RankFailure if the link is broken."""
    try:
        return call()
    except (ConnectionError, TimeoutError) as error:
        raise RankFailure(
            f"A link to another rank failed: {type(error).__name__}: {error}.",
            hint="Look for the failure of another rank in its log.",
        ) from error


class Operation(distributed.Work):
    """An operation of a group: the handle that torch's functions return under `async_op=True`.

    Args:
        label: the operation and its rank, for errors.
        run: does the operation; it may return a function that waits until a sent tensor may change.
        outputs: the tensors that `result()` returns.
        timeout: the longest wait.
        begin: called before anybody waits.
    """

    def __init__(
        self,
        label: str,
        run: Callable[[], object],
        outputs: Sequence[Any],
        timeout: timedelta,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._label = label
        self._run = run
        self._outputs = list(outputs)
        self._timeout = timeout
        self._begin = begin
        self._done = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._finish: object = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Do the operation; keep its error for `wait`."""
        try:
            self._finish = call_link(self._run)
        except Exception as error:
            self._error = error

        # The function holds the tensors, and the caller may keep this handle for long.
        self._run = lambda: None
        self._done.set()
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Return True once the operation is done; raise its error, or RankFailure after `timeout`."""
        self._begin()
        timeout_s = (timeout or self._timeout).total_seconds()
        if not self._done.wait(timeout_s):
            raise RankFailure(f"{self._label} is not done after {timeout_s:g} s.")
        if self._error is not None:
            raise self._error

        # A link's function may be called once only.
        finish = self._finish
        self._finish = None
        if callable(finish):
            call_link(finish)

        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is done. If it is a started send, wait until its tensor may change."""
        self._begin()
        if not self._done.is_set():
            return False
        return self._error is not None or self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        self._begin()
        return self._future


class Finished(distributed.Work):
    """The handle of an operation that its caller has run. An `Operation` costs four times as much."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NONE) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def result(self) -> list[Any]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class OperationQueue:
    """A queue that runs operations one after the other, in the order of the calls.

    A thread runs the queued operations. It starts with the first of them.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Operation | None] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, run: Callable[[], object]) -> bool:
        """Run an operation in the caller unless others are queued; return whether it ran."""
        # Operations run in the order of the calls.
        if self._queue.unfinished_tasks:
            return False

        with self._one_at_a_time:
            call_link(run)
        return True

    def put(self, operation: Operation) -> None:
        """Queue an operation for the thread."""
        if self._thread is None:
            # A daemon, because a thread that is stuck in a link must not keep the process from its end.
            self._thread = threading.Thread(target=self._loop, name="slurmddp-link", daemon=True)
            self._thread.start()
        self._queue.put(operation)

    def end(self) -> None:
        """End the thread after the queued operations; wait for it for a second."""
        self._queue.put(None)
        # The thread itself calls this if it deletes the last reference to the group.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _loop(self) -> None:
        while (operation := self._queue.get()) is not None:
            with self._one_at_a_time:
                operation.run()
            # Otherwise the tensors of the operation would live until the next operation.
            del operation
            self._queue.task_done()
