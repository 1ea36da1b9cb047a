"""Store a worker's tensors by number, and run the controller's commands in their order.

If a command fails, its failure is stored in place of its results. Commands on such results fail as well. The
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
from slurmddp.remote.collective import CommandFailure
from slurmddp.remote.dispatch import Meta
from slurmddp.remote.message_encoding import BYE, MessageEncoding, from_bytes, to_bytes, without_dicts


class Worker:
    """Run the commands of a controller until its goodbye.

    Args:
        controller: the connection to the controller.
        lost: returns the exit code of this process if the controller is lost.
    """

    def __init__(self, controller: Channel, lost: Callable[[], int]) -> None:
        self._controller = controller
        self._lost = lost
        self._objects: dict[int, Any] = {}
        """By number, results of commands; a CommandFailure stands in for the results of a failed command."""
        self._last_negative = 0
        """The last number that this worker has drawn; its numbers are negative, the controller's are not."""
        self._unreported: CommandFailure | None = None
        self._operand: CommandFailure | None = None
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
        """Read the connection all the time, so that this process ends with the controller in any call."""
        try:
            text = ""
            while not text.endswith(BYE):
                text, data = self._controller.receive()
                self._received.put((text, data))
        except (OSError, EOFError):
            os._exit(self._lost())

    def _run(self, line: str) -> None:
        """Run a command; store its results, or its failure, under the numbers of its results."""
        self._operand = None
        results, path, args, named = self._encoding.decode(line)
        is_whole = isinstance(results, int)
        numbers = [results] if is_whole else results
        try:
            # The controller waits for a reply, and other workers wait for a collective, whatever has failed.
            is_awaited = path == "reply" or path.startswith(f"{collective.__name__}.")
            if self._operand is not None and not is_awaited:
                raise self._operand
            if path not in self._functions:
                self._functions[path] = plugins.locate(path, key="remote.call")

            # No tensor here requires a gradient, so autograd records nothing. Under `no_grad`, kernels might
            # not compute results that only the backward pass needs.
            result = self._functions[path](*args, **dict(named))
            objects = dict(zip(numbers, [result] if is_whole else _leaves(result), strict=True))
        except (Exception, SystemExit) as error:
            objects = dict.fromkeys(numbers, self._failure(error, path))

        # Results that are no tensors have the number None.
        objects.pop(None, None)
        self._objects.update(objects)

    def _failure(self, error: BaseException, path: str) -> CommandFailure:
        """Return the failure of a command; remember the first failure for the next reply."""
        if isinstance(error, CommandFailure):
            # The frames of its traceback would keep tensors alive.
            return error.with_traceback(None)

        text = f"{type(error).__name__}: {error} (in {path})"
        failure = CommandFailure(text, "".join(traceback.format_exception(error)))
        if self._unreported is None:
            self._unreported = failure

        return failure

    def _free(self, number: int) -> None:
        self._objects.pop(number, None)

    def _put(self, facts: list[Any], device: str) -> torch.Tensor:
        return from_bytes(facts, self._data).to(device)

    def _reply(self, number: int, kind: str, asked: Any) -> None:
        """Reply to a request, for which the controller waits."""
        failure = self._unreported or self._operand
        self._unreported = None
        value = asked if kind == "describe" else len(self._objects)
        data = NO_DATA
        try:
            # Kernels may fail after their call has returned.
            collective.await_gpu()
            if failure is not None:
                raise failure
            if kind == "fetch":
                value, data = to_bytes(asked)
            text = self._encoding.encode([number, None, without_dicts(value)])
        except Exception as error:
            failure = self._failure(error, kind)
            # This reply reports it.
            self._unreported = None
            text = self._encoding.encode([number, [failure.text, failure.traceback], None])

        self._controller.send(text, data)

    def _find(self, number: int) -> Any:
        value = self._objects[number]
        if isinstance(value, CommandFailure):
            self._operand = value
        return value

    def _describe(self, value: Any) -> Any:
        """Return the description of a tensor for the controller; store the tensor under a new number."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            raise TypeError(f"no remote tensor is {value.layout}; call a function that returns a dense one")

        self._last_negative -= 1
        tensor = value.detach()
        self._objects[self._last_negative] = tensor

        return {"tensor": [self._last_negative, *Meta.of(tensor, str(tensor.device))]}


def _leaves(result: Any) -> list[Any]:
    """Return the tensors and plain values of an operation's result."""
    # No operation accepts None for a tensor that another operation has left undefined.
    return [torch.empty(0) if leaf is None else leaf for leaf in tree_leaves(result)]
