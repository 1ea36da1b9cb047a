"""Send commands to a worker in batches; wait for the worker only in a request, until its reply.

A command is `[RESULTS, FUNCTION, ARGUMENTS, NAMED ARGUMENTS]`. The worker finds the function by its import
path, and stores its results under the numbers RESULTS.
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
"""The largest number of commands in a frame."""
_GATHER_S = 0.001
"""Seconds that a command waits to be sent together with later ones, unless a request waits for a reply."""
_COPIED_BYTES = 1 << 16
"""`put` copies a tensor of at most this size and returns; a larger tensor is sent before it returns."""
_CLOSED = "the workers were closed"


class RemoteError(SlurmddpError):
    """A command failed on a worker. The hint contains the worker's traceback.

    Commands are queued, so the error is raised later: by the next call that waits for this worker.

    Attributes:
        node: the number of the worker.
        host: the name of the worker's machine.
    """

    def __init__(self, node: int, host: str, text: str, traceback: str) -> None:
        hint = f"\nOn worker {node}:\n{traceback.rstrip()}"
        super().__init__(f"Worker {node} on {host}: {text}.", hint=hint)
        self.node = node
        self.host = host


class WorkerLostError(RankFailure):
    """A worker has died, or its machine does not answer. Its tensors are lost, but other workers continue."""


class Owned:
    """Reference to an object on a worker, by its number. When it is deleted, the worker frees the object."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.number = number

    @property
    def reference(self) -> Owned:
        return self

    def fetch(self) -> Any:
        """Wait for the object, and return it: a tensor as a RemoteTensor, a plain value as a copy.

        Raises:
            RemoteError: the call has failed, or its result is neither a tensor nor a plain value.
        """
        return self.node.ask("describe", self)

    def __del__(self) -> None:
        self.node.drop(self.number)


class Node:
    """The controller's end of the connection to a worker: it queues commands and receives replies.

    Args:
        channel: the connection.
        facts: number, host and process id of the worker, and its GPU, such as `cuda:1`, or `cpu`.
        find: returns the remote tensor for a description in a reply.
    """

    def __init__(self, channel: Channel, facts: Sequence[Any], find: Callable[[Node, Any], Any]) -> None:
        self.number, self.host, self.pid, self.device = facts
        self.loss_reported = False
        """Whether a WorkerLostError for this worker has reached the program already."""
        self._encoding = MessageEncoding(self._describe, tensor=partial(find, self))
        self._channel = channel
        self._gone = ""
        """Why the worker is gone, as a clause; empty while it is connected."""
        self._dtype = torch.float32
        """The default dtype on the worker; it follows the default dtype of this process."""
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        """By number, the replies for which requests wait."""
        self._unsent: queue.SimpleQueue[tuple[str, memoryview, threading.Event | None]] = queue.SimpleQueue()
        self._awaited = threading.Event()
        """Event that is set while a request waits for the worker, so that commands are sent at once."""
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, daemon=True).start()

    def new(self) -> Owned:
        """Return a reference with a new number, for an object that a command will create."""
        return Owned(self, next(self._numbers))

    def run(
        self, results: Any, function: str | Callable[..., Any], args: Sequence[Any], named: Any = ()
    ) -> None:
        """Queue a command, without waiting.

        Args:
            results: the number under which the worker stores the result. Or a list, with a number for each
                tensor that the function returns and None for each other value.
            function: a function that the worker can import, or its import path.
            args: the arguments of the function.
            named: pairs of names and arguments.
        """
        self.check()
        if self._dtype is not torch.get_default_dtype():
            self._dtype = torch.get_default_dtype()
            self.run([None], "torch.set_default_dtype", [self._dtype])

        path = function if isinstance(function, str) else f"{function.__module__}.{function.__qualname__}"
        self._unsent.put((self._encoding.encode([results, path, args, named]), NO_DATA, None))

    def put(self, number: int, tensor: torch.Tensor, device: str) -> None:
        """Send a tensor of this process to the worker; the call returns when the tensor may be changed.

        Args:
            number: the number under which the worker stores the tensor.
            tensor: the tensor.
            device: the device on the worker.
        """
        self.check()
        facts, data = to_bytes(tensor)
        sent = threading.Event()
        if len(data) < _COPIED_BYTES:
            data = memoryview(bytes(data))
            sent.set()

        command = self._encoding.encode([number, "put", [facts, device], []])
        self._unsent.put((command, data, sent))
        self._awaited.set()
        sent.wait()

    def ask(self, kind: str, asked: Any = None) -> Any:
        """Send a request, wait until the worker has run all commands before it, and return the reply.

        Args:
            kind: "describe" (returns a remote tensor or a plain value), "fetch" (returns a local copy of a
                tensor), or "count" (returns the number of the worker's objects).
            asked: the object to describe or to fetch.

        Raises:
            RemoteError: a command has failed since the last request, or `asked` depends on a command that
                failed.
            WorkerLostError: the worker is gone.
        """
        number = next(self._numbers)
        reply = Future[Any]()
        self._replies[number] = reply
        try:
            self.run([None], "reply", [number, kind, asked])
            self._awaited.set()
            content = reply.result()
        finally:
            del self._replies[number]

        # None: the connection has ended without a reply. Raise the reason.
        if content is None:
            self.check()

        failure, value, data = content
        if failure is not None:
            raise RemoteError(self.number, self.host, *failure)

        return from_bytes(value, data) if kind == "fetch" else value

    def drop(self, number: int) -> None:
        """Queue a command by which the worker frees object `number`.

        The garbage collector may call this at any time, so it must not take a lock. `SimpleQueue.put` is
        reentrant.
        """
        if not self._gone:
            self._unsent.put((f'[[null],"free",[{number}],[]]', NO_DATA, None))

    def check(self) -> None:
        """Raise WorkerLostError if the worker is lost, and SlurmddpError if the workers were closed."""
        if self._gone == _CLOSED:
            raise SlurmddpError(
                f"The tensor on worker {self.number} is gone, because the workers were closed.",
                hint="Fetch results inside of `with remote.workers(...)`.",
            )

        if self._gone:
            self.loss_reported = True
            raise WorkerLostError(
                f"Worker {self.number} (process {self.pid} on {self.host}) is gone: {self._gone}.",
                hint="Its tensors are lost. Create them again on another worker, or restart the workers.",
            )

    def close(self) -> None:
        """Close the connection after all queued commands. The worker ends when it has run them."""
        if not self._gone:
            self._gone = _CLOSED
        self._unsent.put((BYE, NO_DATA, None))
        self._awaited.set()
        self._sender.join()
        self._channel.close()

    def _send(self) -> None:
        """Send the queued commands in frames; runs in the sender thread.

        A frame contains up to _BATCH commands. A command with a tensor's bytes is the last of its frame.
        """
        command = ""
        while command != BYE:
            command, data, sent = self._unsent.get()
            self._awaited.wait(_GATHER_S)
            self._awaited.clear()

            commands = [command]
            # Stop at BYE, after which the garbage collector may have queued commands.
            while command != BYE and data is NO_DATA and len(commands) < _BATCH and not self._unsent.empty():
                command, data, sent = self._unsent.get()
                commands.append(command)

            # Ignore the error here: `_receive` handles the end of the connection.
            with suppress(OSError):
                self._channel.send("\n".join(commands), data)

            if sent is not None:
                sent.set()

    def _receive(self) -> None:
        """Receive replies, and pass each to the request that waits for it; runs in the receiver thread.

        When the connection ends, all requests get None.
        """
        try:
            while True:
                text, data = self._channel.receive()
                number, failure, value = self._encoding.decode(text)
                reply = self._replies.get(number)
                # If Ctrl-C has interrupted the request, nothing waits for its reply any more.
                if reply is not None:
                    reply.set_result((failure, value, data))
        except Exception as error:
            if not self._gone:
                self._gone = str(error)

        for reply in list(self._replies.values()):
            if not reply.done():
                reply.set_result(None)

    def _describe(self, value: Any) -> Any:
        """Return the JSON form of an operand: an object on this worker, or a local 0-dim tensor.

        Return None for other types.

        Raises:
            ConfigError: the object is on another worker, or is a larger local tensor.
        """
        reference = getattr(value, "reference", None)
        if isinstance(reference, Owned) and reference.node is self:
            return {"ref": reference.number}
        if isinstance(reference, Owned) or (isinstance(value, torch.Tensor) and value.dim()):
            raise misplaced("A command", value, f"others on node {self.number}")
        if isinstance(value, torch.Tensor):
            return {"scalar": [value.item(), value.dtype]}

        return None


def misplaced(what: str, *operands: Any) -> ConfigError:
    """Return the error for an operation whose operands are not on one worker.

    Args:
        what: the operation, at the beginning of the sentence.
        operands: two of the operands: tensors, results of calls, or texts that describe them.
    """
    first, second = (operand if isinstance(operand, str) else _described(operand) for operand in operands)
    return ConfigError(
        f"{what} got {first} and {second}.",
        hint="All operands of an operation must be on one worker. Move one first: remote.send(x, NODE) "
        "to a worker, x.fetch() to this process. Create new tensors inside of `with remote.node(NODE):`, and "
        "call backward() there too.",
    )


def _described(value: Any) -> str:
    """Return a text for an error: the shape of a tensor or result, and the process that holds it."""
    kind = "a result"
    if isinstance(value, torch.Tensor):
        kind = f"a tensor of shape {tuple(value.shape)}"

    place = "in this process"
    reference = getattr(value, "reference", None)
    if isinstance(reference, Owned):
        place = f"on node {reference.node.number}"
    return f"{kind} {place}"
