"""A worker: it holds tensors by number and runs the controller's commands in their order.

    python -m slurmddp.remote.worker ADDRESS PORT WORLD_SIZE

A command that fails puts its failure in the place of its results. Commands on such results fail alike. The
next request, for which the controller waits, reports the failure, and the worker goes on.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurmddp import plugins
from slurmddp.environments.detect import detect
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import LAUNCHER_VARIABLE, SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.launchers.link.connection import Secret
from slurmddp.remote import channel, collective
from slurmddp.remote.channel import NO_DATA, PURPOSE, Channel
from slurmddp.remote.message_encoding import BYE, MessageEncoding, from_bytes, to_bytes, without_dicts
from slurmddp.training.process_group.setup import RankContext, finish, start
from slurmddp.training.process_group.signed_store import SignedStore

_EVENT_S = 1800.0
"""Seconds to wait for an event of another worker, as long as for a collective."""

_TELL_OTHERS = ("collective", "give")
"""Commands that run although an operand has failed, to tell the workers that wait for this worker."""


@dataclass
class Failure(Exception):
    """The failure of a command, which takes the place of its results."""

    text: str
    traceback: str


class Worker:
    """Run the commands of one controller until it says goodbye."""

    def __init__(self, controller: Channel, context: RankContext, lost: Callable[[], int]) -> None:
        self._controller, self._context, self._lost = controller, context, lost
        self._held: dict[int, Any] = {}
        self._next_own = 0
        """Numbers of objects that the controller has not numbered are negative."""
        self._unreported: Failure | None = None
        self._operand: Failure | None = None
        """A failure among the operands of the command that is being read."""
        self._encoding = MessageEncoding(self._describe, self._find)
        self._functions: dict[str, Callable[..., Any]] = {}
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
            while True:
                text, data = self._controller.receive()
                self._received.put((text, data))
                if text.endswith(BYE):
                    return
        except (OSError, EOFError):
            os._exit(self._lost())

    def _run(self, line: str) -> None:
        self._operand = None
        kind, results, *operands = self._encoding.decode(line)
        if kind == "free":
            self._held.pop(results, None)
            return
        if kind == "reply":
            self._reply(results, *operands)
            return
        numbers = [results] if isinstance(results, int) else results
        try:
            if self._operand is not None and kind not in _TELL_OTHERS:
                raise self._operand
            found = getattr(self, f"_do_{kind}")(*operands)
            made = dict(zip(numbers, [found] if isinstance(results, int) else _leaves(found), strict=True))
        except Exception as error:
            made = dict.fromkeys(numbers, self._failure(error, f"{kind} {operands[0] if operands else ''}"))
        made.pop(None, None)  # The number of a result that is no tensor.
        self._held.update(made)

    def _failure(self, error: Exception, command: str) -> Failure:
        if isinstance(error, Failure):
            return error.with_traceback(None)  # Its frames would keep tensors alive.
        text = f"{type(error).__name__}: {error} (in {command})"
        failure = Failure(text, "".join(traceback.format_exception(error)))
        self._unreported = self._unreported or failure
        return failure

    # --- commands; the operands of each are those that the controller sends

    def _do_op(self, name: str, args: list[Any], kwargs: list[Any]) -> Any:
        if name not in self._functions:
            namespace, operation, overload = name.split(".")
            self._functions[name] = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
        # No tensor here requires a gradient. `no_grad` would let some kernels leave out what backward needs.
        return self._functions[name](*args, **dict(kwargs))

    def _do_call(self, path: str, args: list[Any], kwargs: list[Any]) -> Any:
        return plugins.locate(path, key="remote.call")(*args, **dict(kwargs))

    def _do_put(self, facts: list[Any]) -> torch.Tensor:
        return from_bytes(facts, self._data)

    def _do_move(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        return tensor.detach().to(device)

    def _do_collective(self, name: str, nodes: list[int], *operands: Any) -> Any:
        return collective.run(self._operand, name, nodes, *operands)

    def _do_give(self, tensor: torch.Tensor, node: int) -> Any:
        return collective.give(self._operand, tensor, node)

    def _do_take(self, *source: Any) -> Any:
        return collective.take(*source)

    def _do_event(self, name: str) -> list[torch.Tensor]:
        if self._context.store is not None:
            self._store().set(name, "reached")
        return []

    def _do_wait(self, name: str) -> list[torch.Tensor]:
        if self._store().wait([name], _EVENT_S) == [None]:
            raise TimeoutError(f"the other worker did not reach the event within {_EVENT_S:.0f} s")
        return []

    def _store(self) -> SignedStore:
        return SignedStore(self._context.store, self._context.info.launch_id)

    # --- requests, for which the controller waits

    def _reply(self, number: int, kind: str, asked: Any = None) -> None:
        failure, self._unreported = self._unreported or self._operand, None
        value: Any = None
        data = NO_DATA
        try:
            if failure is not None:
                raise failure
            if kind == "fetch":
                value, data = to_bytes(asked)
            else:
                value = len(self._held) if kind == "count" else without_dicts(asked)
            text = self._encoding.encode([number, None, value])
        except Exception as error:
            failure, self._unreported = self._failure(error, kind), None
            text = self._encoding.encode([number, [failure.text, failure.traceback], None])
        self._controller.send(text, data)

    def _find(self, tag: str, content: Any) -> Any:
        found = self._held[content]
        if isinstance(found, Failure):
            self._operand = found
        return found

    def _describe(self, value: Any) -> Any:
        """Describe a tensor for the controller, and keep it under a number of this worker."""
        if not isinstance(value, torch.Tensor):
            return None
        self._next_own -= 1
        self._held[self._next_own] = value = value.detach()
        facts = [list(value.shape), list(value.stride()), value.dtype, value.storage_offset()]
        return {"tensor": [self._next_own, *facts, str(value.device)]}


def _leaves(result: Any) -> list[Any]:
    """Return the tensors and plain values of an operation's result in their order."""
    if isinstance(result, (list, tuple)):
        return [leaf for one in result for leaf in _leaves(one)]
    # An operation takes no None in place of a tensor that another operation has left undefined.
    return [torch.empty(0) if result is None else result]


def context_of(info: RankInfo) -> RankContext:
    """Make this process a rank of the workers' process group."""
    return start(info, backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def serve(address: tuple[str, int], context: RankContext, lost: Callable[[], int] = lambda: 0) -> None:
    """Serve the controller at `address` until it says goodbye.

    If the controller dies, this process exits with the code that `lost` returns. If the controller's script
    has ended and never asked for this worker, the function returns.
    """
    secret = Secret(os.environ.get(SECRET_VARIABLE, ""), PURPOSE)
    facts = {"rank": context.info.rank, "pid": os.getpid(), "device": str(context.device)}
    try:
        end = socket.create_connection(address)
    except ConnectionRefusedError:  # The script has closed its listener.
        return
    try:
        controller = channel.join(end, secret, **facts)
    except (OSError, EOFError):
        return
    Worker(controller, context, lost).serve()
    finish(context)
    controller.close()


def main(words: Sequence[str]) -> int:
    """Serve the controller that listens at `ADDRESS PORT`, as `WORLD_SIZE` processes outside of srun."""
    address, world_size = (words[0], int(words[1])), int(words[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller.
    if os.environ.get(LAUNCHER_VARIABLE) == "local":
        # Processes that are forked after the import of torch share its cost, as an agent's ranks do.
        rank = next((rank for rank in range(1, world_size) if os.fork() == 0), 0)
        os.environ.update(rank_environment(RankInfo(environment="local"), rank, world_size))
    serve(address, context_of(detect(os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
