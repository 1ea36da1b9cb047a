"""A worker: it holds tensors by number and runs the controller's commands in their order.

A command that fails puts its failure in the place of its results. Commands on such results fail alike. The
next request, for which the controller waits, reports the failure, and the worker goes on.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slurmddp import plugins
from slurmddp.remote import collective
from slurmddp.remote.channel import NO_DATA, Channel
from slurmddp.remote.collective import Failure
from slurmddp.remote.dispatch import Meta
from slurmddp.remote.message_encoding import BYE, MessageEncoding, from_bytes, to_bytes, without_dicts


class Worker:
    """Run the commands of one controller until it says goodbye."""

    def __init__(self, controller: Channel, lost: Callable[[], int]) -> None:
        self._controller, self._lost = controller, lost
        self._held: dict[int, Any] = {}
        self._next_own = 0
        """Numbers of objects that the controller has not numbered are negative."""
        self._unreported: Failure | None = None
        self._operand: Failure | None = None
        """A failure among the operands of the command that is being read."""
        self._encoding = MessageEncoding(self._describe, ref=self._find)
        self._functions: dict[str, Any] = {"free": self._free, "put": self._put, "reply": self._reply}
        self._received: queue.SimpleQueue[tuple[str, memoryview]] = queue.SimpleQueue()
        self._data = NO_DATA
        """The bytes of the frame whose commands are being run."""

    def serve(self) -> None:
        """Run commands until the end."""
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            text, self._data = self._received.get()
            for line in text.split("\n"):
                if line == BYE:
                    return
                self._run(line)

    def _receive(self) -> None:
        """Read the connection all the time, so that a dead controller ends this process, whatever it runs."""
        try:
            text = ""
            while not text.endswith(BYE):
                text, data = self._controller.receive()
                self._received.put((text, data))
        except (OSError, EOFError):
            os._exit(self._lost())

    def _run(self, line: str) -> None:
        """Run one command, and keep its results, or its failure, under the numbers of its results."""
        self._operand = None
        results, path, args, named = self._encoding.decode(line)
        is_whole = isinstance(results, int)
        numbers = [results] if is_whole else results
        try:
            # The controller waits for a reply, and other workers wait for a collective, whatever has failed.
            waited_for = path == "reply" or path.startswith(f"{collective.__name__}.")
            if self._operand is not None and not waited_for:
                raise self._operand
            if path not in self._functions:
                self._functions[path] = plugins.locate(path, key="remote.call")
            # No tensor here requires a gradient; `no_grad` would let kernels leave out what backward needs.
            found = self._functions[path](*args, **dict(named))
            made = dict(zip(numbers, [found] if is_whole else _leaves(found), strict=True))
        except (Exception, SystemExit) as error:
            made = dict.fromkeys(numbers, self._failure(error, path))
        made.pop(None, None)  # The number of a result that is no tensor.
        self._held.update(made)

    def _failure(self, error: BaseException, path: str) -> Failure:
        if isinstance(error, Failure):
            return error.with_traceback(None)  # Its frames would keep tensors alive.
        text = f"{type(error).__name__}: {error} (in {path})"
        failure = Failure(text, "".join(traceback.format_exception(error)))
        self._unreported = self._unreported or failure
        return failure

    def _free(self, number: int) -> None:
        self._held.pop(number, None)

    def _put(self, facts: list[Any], device: str) -> torch.Tensor:
        return from_bytes(facts, self._data).to(device)

    def _reply(self, number: int, kind: str, asked: Any) -> None:
        """Answer a request, for which the controller waits."""
        failure, self._unreported = self._unreported or self._operand, None
        value, data = asked if kind == "describe" else len(self._held), NO_DATA
        try:
            collective.await_gpu()
            if failure is not None:
                raise failure
            if kind == "fetch":
                value, data = to_bytes(asked)
            text = self._encoding.encode([number, None, without_dicts(value)])
        except Exception as error:
            failure, self._unreported = self._failure(error, kind), None
            text = self._encoding.encode([number, [failure.text, failure.traceback], None])
        self._controller.send(text, data)

    def _find(self, number: int) -> Any:
        found = self._held[number]
        if isinstance(found, Failure):
            self._operand = found
        return found

    def _describe(self, value: Any) -> Any:
        """Describe a tensor for the controller, and keep it under a number of this worker."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            raise TypeError(f"no remote tensor is {value.layout}; call a function that returns a dense one")
        self._next_own -= 1
        self._held[self._next_own] = value = value.detach()
        return {"tensor": [self._next_own, *Meta.of(value, str(value.device))]}


def _leaves(found: Any) -> list[Any]:
    """Return the tensors and plain values of an operation's result."""
    # An operation takes no None in place of a tensor that another operation has left undefined.
    return [torch.empty(0) if one is None else one for one in tree_leaves(found)]
