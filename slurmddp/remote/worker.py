"""Store a worker's tensors by number, and run the controller's commands in their order.

If a command fails, its failure is stored in place of its results. Commands on such results fail as well. The
reply to the controller's next request reports the failure, and the worker runs the commands after it.
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
    """The worker's end of the connection to a controller: it runs commands and stores their results.

    Args:
        controller: the connection to the controller.
        lost: called if the connection to the controller is lost. It returns the exit code of this process.
    """

    def __init__(self, controller: Channel, lost: Callable[[], int]) -> None:
        self._controller = controller
        self._lost = lost
        self._objects: dict[int, Any] = {}
        """By number, the results of commands; a CommandFailure replaces each result of a failed command."""
        self._last_negative = 0
        """The last number that this worker has drawn; its numbers are negative, the controller's are not."""
        self._unreported: CommandFailure | None = None
        self._operand: CommandFailure | None = None
        """The failure of an operand of the command that is being decoded; None if no operand has failed."""
        self._encoding = MessageEncoding(self._describe, ref=self._find)
        self._functions: dict[str, Any] = {"free": self._free, "put": self._put, "reply": self._reply}
        self._received: queue.SimpleQueue[tuple[str, memoryview]] = queue.SimpleQueue()
        self._data = NO_DATA
        """The bytes of the frame whose commands are being run."""

    def serve(self) -> None:
        """Run the controller's commands until it sends BYE."""
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            text, self._data = self._received.get()
            for line in text.split("\n"):
                if line == BYE:
                    return
                self._run(line)

    def _receive(self) -> None:
        """Receive frames from the controller; runs in the receiver thread.

        So this process notices the loss of the controller, and exits, even while a command runs.
        """
        try:
            text = ""
            while not text.endswith(BYE):
                text, data = self._controller.receive()
                self._received.put((text, data))
        except (OSError, EOFError):
            os._exit(self._lost())

    def _run(self, line: str) -> None:
        """Decode and run a command; store its results, or its failure, under the numbers of the results."""
        self._operand = None
        results, path, args, named = self._encoding.decode(line)
        is_whole = isinstance(results, int)
        numbers = [results] if is_whole else results
        try:
            # Run replies and collectives even if an operand has failed: the controller or other workers wait
            # for them.
            is_awaited = path == "reply" or path.startswith(f"{collective.__name__}.")
            if self._operand is not None and not is_awaited:
                raise self._operand
            if path not in self._functions:
                self._functions[path] = plugins.locate(path, key="remote.call")

            # `no_grad` is not needed, because no tensor here requires a gradient. With it, kernels might not
            # compute results that only the backward pass needs.
            result = self._functions[path](*args, **dict(named))
            objects = dict(zip(numbers, [result] if is_whole else _leaves(result), strict=True))
        except (Exception, SystemExit) as error:
            objects = dict.fromkeys(numbers, self._failure(error, path))

        # Results that are not tensors have the number None. Don't store them.
        objects.pop(None, None)
        self._objects.update(objects)

    def _failure(self, error: BaseException, path: str) -> CommandFailure:
        """Return the failure to store for a command; keep the first one, for the next reply to report."""
        if isinstance(error, CommandFailure):
            # Remove the traceback, whose frames would keep tensors in memory.
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
        """Send the reply to a request of the controller: a value, or a failure that was not reported yet.

        Args:
            number: the number of the request.
            kind: "describe", "fetch" or "count", as in `Node.ask`.
            asked: the object to describe or to fetch.
        """
        failure = self._unreported or self._operand
        self._unreported = None
        value = asked if kind == "describe" else len(self._objects)
        data = NO_DATA
        try:
            # Wait for the GPU, because kernels may fail after their call has returned.
            collective.await_gpu()
            if failure is not None:
                raise failure
            if kind == "fetch":
                value, data = to_bytes(asked)
            text = self._encoding.encode([number, None, without_dicts(value)])
        except Exception as error:
            failure = self._failure(error, kind)
            # This reply reports the failure, so the next one need not.
            self._unreported = None
            text = self._encoding.encode([number, [failure.text, failure.traceback], None])

        self._controller.send(text, data)

    def _find(self, number: int) -> Any:
        value = self._objects[number]
        if isinstance(value, CommandFailure):
            self._operand = value
        return value

    def _describe(self, value: Any) -> Any:
        """Store a tensor under a new number, and return its description for the controller.

        Return None for other objects.
        """
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            raise TypeError(
                f"a remote tensor can't be {value.layout}; call a function that returns a dense tensor"
            )

        self._last_negative -= 1
        tensor = value.detach()
        self._objects[self._last_negative] = tensor

        return {"tensor": [self._last_negative, *Meta.of(tensor, str(tensor.device))]}


def _leaves(result: Any) -> list[Any]:
    """Return the tensors and plain values in an operation's result, as a flat list."""
    # Replace None, which stands for an undefined tensor: other operations accept no None as a tensor.
    return [torch.empty(0) if leaf is None else leaf for leaf in tree_leaves(result)]
