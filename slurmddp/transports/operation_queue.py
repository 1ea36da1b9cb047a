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
"""The time-out that torch passes if the caller gives none; the time-out of the group then takes its place."""
_END_S = 1.0
"""The longest wait, in seconds, for the thread at the end of a group."""


def call_link(call: Callable[[], T]) -> T:
    """Call a function that uses a link, and return its result.

    Raises:
        RankFailure: the function raised a ConnectionError or a TimeoutError.
    """
    try:
        return call()
    except (ConnectionError, TimeoutError) as error:
        raise RankFailure(
            f"A link to another rank failed: {type(error).__name__}: {error}.",
            hint="Look for the failure of another rank in its log.",
        ) from error


class Operation(distributed.Work):
    """An operation of a process group, and the handle that torch's functions return with `async_op=True`.

    Args:
        label: name and rank of the operation, for errors.
        run: does the work. It may return a function that waits until a sent tensor may change.
        outputs: the tensors that `result()` returns.
        timeout: the longest wait in `wait`, if its caller gives no other.
        begin: called before each wait, to start an operation that is not queued yet.
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
        """Do the work of the operation. `wait` raises an error of the work."""
        try:
            self._finish = call_link(self._run)
        except Exception as error:
            self._error = error

        # Drop the function: it refers to the tensors, and the caller may keep this handle for a long time.
        self._run = lambda: None
        self._done.set()
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait until the operation is done, raise its error if it failed, and return True.

        Raises:
            RankFailure: the operation is not done within `timeout`.
        """
        self._begin()
        timeout_s = (timeout or self._timeout).total_seconds()
        if not self._done.wait(timeout_s):
            raise RankFailure(
                f"{self._label} did not end within {timeout_s:g} s.",
                hint="Look for a rank that takes no part in it: its log may show why.",
            )
        if self._error is not None:
            raise self._error

        # Forget the link's function before the call, because it may be called only once.
        finish = self._finish
        self._finish = None
        if callable(finish):
            call_link(finish)

        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is done. For a send, this waits until its tensor may change."""
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
    """Handle of an operation that has already run; creating it takes a quarter of an `Operation`'s time."""

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
    """Queue that runs operations one after the other, in the order of the calls.

    A thread runs the queued operations. It is started for the first of them.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Operation | None] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, run: Callable[[], object]) -> bool:
        """Run an operation in the calling thread, and return True; False if other operations are queued."""
        # Queued operations must run first, because they were called first.
        if self._queue.unfinished_tasks:
            return False

        with self._one_at_a_time:
            call_link(run)
        return True

    def put(self, operation: Operation) -> None:
        """Queue an operation, which the thread runs after all earlier ones."""
        if self._thread is None:
            # Make it a daemon, so that a thread that is stuck in a link does not keep the process alive.
            self._thread = threading.Thread(target=self._loop, name="slurmddp-link", daemon=True)
            self._thread.start()
        self._queue.put(operation)

    def end(self) -> None:
        """Let the thread end after the queued operations, and wait for it for at most a second (_END_S)."""
        self._queue.put(None)
        # A thread can't join itself. The queue's thread calls this method if it deletes the last reference to
        # the group.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _loop(self) -> None:
        while (operation := self._queue.get()) is not None:
            with self._one_at_a_time:
                operation.run()
            # Delete the reference, or the operation's tensors would stay in memory until the next operation.
            del operation
            self._queue.task_done()
