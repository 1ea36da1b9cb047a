"""The controller's end of one worker: commands go out in batches, and only a request waits for its answer.

A command is `[RESULTS, FUNCTION, ARGUMENTS, NAMED ARGUMENTS]`. The worker finds the function by its import
path and keeps what it returns under the numbers RESULTS.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from slurmddp.errors import ConfigError, RankFailure, SlurmddpError
from slurmddp.remote.channel import NO_DATA, Channel
from slurmddp.remote.message_encoding import BYE, MessageEncoding, from_bytes, to_bytes

_BATCH = 512
"""Most commands in one frame."""
_GATHER_S = 0.001
"""Seconds that commands wait for more to share their frame, unless somebody waits for the worker."""
_COPIED_BYTES = 1 << 16
"""A smaller tensor is copied on its way out; a larger one is sent before `put` returns."""
_CLOSED = "the workers were closed"


class RemoteError(SlurmddpError):
    """A command failed on a worker. The hint holds its traceback there.

    The next point that waits for this worker raises the error, not the line that has failed.

    Attributes:
        node: the worker's number.
        host: the name of its machine.
    """

    def __init__(self, node: int, host: str, text: str, traceback: str) -> None:
        hint = f"\nOn worker {node}:\n{traceback.rstrip()}"
        super().__init__(f"Worker {node} on {host}: {text}.", hint=hint)
        self.node, self.host = node, host


class WorkerLostError(RankFailure):
    """A worker has died, or its machine does not answer. Its tensors are lost; other workers go on."""


class Owned:
    """An object of a worker, by its number. The worker frees the object after this reference's last use."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number

    @property
    def reference(self) -> Owned:
        return self

    def fetch(self) -> Any:
        """Wait for the object, and return it: tensors stay on the worker, plain values come here.

        Raises:
            RemoteError: the call has failed, or its result is neither a tensor nor a plain value.
        """
        return self.node.ask("describe", self)

    def __del__(self) -> None:
        self.node.drop(self.number)


class Node:
    """One worker, as the controller sees it.

    Args:
        channel: the connection.
        facts: number, host and process of the worker, and its own GPU, such as `cuda:1`, or `cpu`.
        find: returns the tensor of this worker that a reply describes.
    """

    def __init__(self, channel: Channel, facts: Sequence[Any], find: Callable[[Node, Any], Any]) -> None:
        self.number, self.host, self.pid, self.device = facts
        self.loss_reported = False
        """Whether a WorkerLostError has been raised for this worker."""
        self._encoding = MessageEncoding(self._describe, tensor=partial(find, self))
        self._channel = channel
        self._gone = ""
        self._dtype = torch.float32
        """The default dtype on the worker, which follows the one here."""
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._unsent: queue.SimpleQueue[tuple[str, memoryview, threading.Event | None]] = queue.SimpleQueue()
        self._awaited = threading.Event()
        """Set while somebody waits for the worker, so that commands are sent at once."""
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, daemon=True).start()

    def new(self) -> Owned:
        """Return a number for an object that a command is about to make."""
        return Owned(self, next(self._numbers))

    def run(
        self, results: Any, function: str | Callable[..., Any], args: Sequence[Any], named: Any = ()
    ) -> None:
        """Put a command into the queue.

        Args:
            results: the number of the object that the function returns; or a list with a number for each
                tensor that it returns, and None for each other value.
            function: a function of this package, or an import path.
            args: its arguments.
            named: pairs of names and arguments.
        """
        self.check()
        if self._dtype is not torch.get_default_dtype():
            self._dtype = torch.get_default_dtype()
            self.run([None], "torch.set_default_dtype", [self._dtype])
        path = function if isinstance(function, str) else f"{function.__module__}.{function.__qualname__}"
        self._unsent.put((self._encoding.encode([results, path, args, named]), NO_DATA, None))

    def put(self, number: int, tensor: torch.Tensor, device: str) -> None:
        """Send a tensor of this process to `device` of the worker; return once the tensor may be changed."""
        self.check()
        facts, data = to_bytes(tensor)
        sent = threading.Event()
        if len(data) < _COPIED_BYTES:
            data = memoryview(bytes(data))
            sent.set()
        self._unsent.put((self._encoding.encode([number, "put", [facts, device], []]), data, sent))
        self._awaited.set()
        sent.wait()

    def ask(self, kind: str, asked: Any = None) -> Any:
        """Wait until the worker has run all commands so far; return its answer.

        Raises:
            RemoteError: a command has failed since the last request, or one on which `asked` depends.
            WorkerLostError: the worker is gone.
        """
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        try:
            self.run([None], "reply", [number, kind, asked])
            self._awaited.set()
            answered = answer.result()
        finally:
            del self._answers[number]
        if answered is None:
            self.check()
        failure, value, data = answered
        if failure is not None:
            raise RemoteError(self.number, self.host, *failure)
        return from_bytes(value, data) if kind == "fetch" else value

    def drop(self, number: int) -> None:
        """Let the worker drop an object; a collection of garbage calls it, so it takes no lock."""
        if not self._gone:
            self._unsent.put((f'[[null],"free",[{number}],[]]', NO_DATA, None))

    def check(self) -> None:
        """Raise WorkerLostError if the worker is gone, SlurmddpError if it was closed."""
        if self._gone == _CLOSED:
            raise SlurmddpError(
                f"The tensor of worker {self.number} is gone: the workers were closed.",
                hint="Fetch results inside of `with remote.workers(...)`.",
            )
        if self._gone:
            self.loss_reported = True
            raise WorkerLostError(
                f"Worker {self.number} (process {self.pid} on {self.host}) is gone: {self._gone}.",
                hint="Its tensors are lost. Make them again on another worker, or start the workers again.",
            )

    def close(self) -> None:
        """End the connection; the worker leaves after the commands so far."""
        self._gone = self._gone or _CLOSED
        self._unsent.put((BYE, NO_DATA, None))
        self._awaited.set()
        self._sender.join()
        self._channel.close()

    def _send(self) -> None:
        """Send commands as they come; a frame holds all that have come meanwhile, up to a tensor's bytes."""
        command = ""
        while command != BYE:
            command, data, sent = self._unsent.get()
            self._awaited.wait(_GATHER_S)
            self._awaited.clear()
            commands = [command]
            # A collection of garbage may have put a command behind the goodbye.
            while command != BYE and data is NO_DATA and len(commands) < _BATCH and not self._unsent.empty():
                command, data, sent = self._unsent.get()
                commands.append(command)
            with suppress(OSError):  # `_receive` finds the end of the connection.
                self._channel.send("\n".join(commands), data)
            if sent is not None:
                sent.set()

    def _receive(self) -> None:
        """Give each answer to the request that waits for it; the end of the connection ends them all."""
        try:
            while True:
                text, data = self._channel.receive()
                number, failure, value = self._encoding.decode(text)
                if answer := self._answers.get(number):  # Ctrl-C may have ended the request.
                    answer.set_result((failure, value, data))
        except Exception as error:
            self._gone = self._gone or str(error)
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_result(None)

    def _describe(self, value: Any) -> Any:
        """Return the description of an object of this worker, or of a local tensor of one number."""
        reference = getattr(value, "reference", None)
        if isinstance(reference, Owned) and reference.node is self:
            return {"ref": reference.number}
        if isinstance(reference, Owned) or (isinstance(value, torch.Tensor) and value.dim()):
            raise misplaced("A command", value, f"others on node {self.number}")
        return {"scalar": [value.item(), value.dtype]} if isinstance(value, torch.Tensor) else None


def misplaced(what: str, *operands: Any) -> ConfigError:
    """Return the error for two operands in different places, each a tensor or the name of a place."""
    first, second = (one if isinstance(one, str) else _place(one) for one in operands)
    return ConfigError(
        f"{what} got {first} and {second}.",
        hint="An operation runs where all of its operands are. Move one of them first: remote.send(x, NODE) "
        "to a worker, x.fetch() to this process. Create new ones inside of `with remote.node(NODE):`, where "
        "backward() creates its own too.",
    )


def _place(value: Any) -> str:
    reference = getattr(value, "reference", None)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "a result"
    where = f"on node {reference.node.number}" if isinstance(reference, Owned) else "in this process"
    return f"{kind} {where}"
