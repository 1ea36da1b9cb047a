"""Put things on a worker: factories of tensors, copies, calls of functions, and events to wait for."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurmddp.errors import ConfigError
from slurmddp.remote import collective
from slurmddp.remote.connection import Node, Owned
from slurmddp.remote.controller import Workers
from slurmddp.remote.dispatch import RemoteTensor, aten, dispatch, move
from slurmddp.remote.message_encoding import without_dicts

Model = TypeVar("Model", bound=torch.nn.Module)


def _current(number: int) -> Node:
    if Workers.current is None:
        raise ConfigError("There are no workers.", hint="Open them first: `with remote.workers(4) as w:`.")
    return Workers.current.node(number)


class Placement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Create all tensors of a block on worker `number`; operations follow their operands as ever.

    Example:
        with remote.node(2):
            a = torch.zeros(10)
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._node = _current(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, RemoteTensor) for kind in types):
            return dispatch(func, args, kwargs or {})
        if func is aten.lift_fresh.default:  # The data of torch.tensor([...]).
            return move(args[0], self._node)
        returns = func._schema.returns
        has_tensors = any(isinstance(one, torch.Tensor) for one in tree_leaves((args, kwargs)))
        if has_tensors or not returns or str(returns[0].type) != "Tensor":
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {}, self._node)


def factory(name: str) -> Callable[..., torch.Tensor]:
    """Return a factory of torch, such as `torch.zeros`, that makes its tensor on worker `node`."""
    make = getattr(torch, name)

    def made(*args: Any, node: int, device: str | None = None, **kwargs: Any) -> torch.Tensor:
        with Placement(node):
            found: Any = make(*args, **kwargs)
        if not isinstance(found, torch.Tensor):
            raise ConfigError(f"torch.{name} returns no tensor.", hint="Call it on a worker: remote.call().")
        if not isinstance(found, RemoteTensor):  # Made of tensors that are here, as by `stack`.
            found = send(found, node)
        placed: torch.Tensor = found if device is None else found.to(device)
        return placed

    made.__qualname__ = f"remote.{name}"  # The name in Python's error for a missing `node`.
    return made


def send(tensor: torch.Tensor, node: int) -> torch.Tensor:
    """Copy a tensor to worker `node`, also as `tensor.dist_send(node=1)`; gradients go back the same way.

    A tensor of another worker goes there directly, not through this process.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"remote.send takes a tensor, not {tensor!r:.80}.", hint="Say torch.tensor(...).")
    return move(tensor, _current(node))


def module(model: Model, node: int) -> Model:
    """Return a copy of a model on worker `node`, with the tensors that its forward pass creates.

    Optimizers, hooks and `state_dict` work as on a local model. `model.load_state_dict(copy.state_dict())`
    brings the weights back.

    Example:
        model = remote.module(torch.nn.Linear(8, 1), node=1)
        model(torch.randn(4, 8).dist_send(node=1)).sum().backward()
    """
    there: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sent = send(tensor.detach(), node)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        there[id(tensor)] = torch.nn.Parameter(sent, tensor.requires_grad) if is_parameter else sent
    placed = copy.deepcopy(model, there)  # It takes these tensors in place of copies of the model's own.

    class OnWorker(type(placed)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with Placement(node):
                return super().forward(*args, **kwargs)

    OnWorker.__name__ = OnWorker.__qualname__ = type(placed).__name__
    placed.__class__ = OnWorker
    return placed


def call(function: str, *args: Any, node: int, **kwargs: Any) -> Owned:
    """Call a function on worker `node`, without waiting.

    Args:
        function: its import path; only the path goes to the worker, never code.
        *args: numbers, texts, lists and dictionaries, tensors of this worker, and results of calls there.
        node: the worker.
        **kwargs: as `args`.

    Returns:
        The result, as an operand of further calls there. Its `fetch` waits for it: tensors stay on the
        worker, plain values come here.

    Example:
        env = remote.call("my_project.environment.make", "maze", node=1)
        steps = remote.call("my_project.environment.play", env, policy, node=1).fetch()
    """
    if not isinstance(function, str):
        raise ConfigError(
            f"remote.call takes an import path, not {function!r}.",
            hint="Put the function into a module that the workers can import: 'my_project.module.function'.",
        )
    made = _current(node).new()
    made.node.run(made.number, function, without_dicts(args), without_dicts(list(kwargs.items())))
    return made


class Event:
    """This place in the order of worker `node`'s commands, as `remote.record_event(node=1)`."""

    def __init__(self, node: int) -> None:
        self._node, self._name = _current(node), f"controller/event/{secrets.token_hex(8)}"
        self._node.run([None], collective.reach, [self._name])

    def wait(self, node: int) -> None:
        """Let worker `node` run nothing further until the event's worker has come to the event."""
        other = _current(node)
        if other is not self._node:
            other.run([None], collective.wait_for, [self._name])

    def synchronize(self) -> None:
        """Wait here until the event's worker has come to it, and to whatever was put into its queue since."""
        self._node.ask("count")
