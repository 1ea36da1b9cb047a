"""Create tensors on a worker, copy tensors and models to it, call its functions, wait for its events."""

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
        raise ConfigError("No workers are open.", hint="Open them first: `with remote.workers(4) as w:`.")
    return Workers.current.node(number)


class Placement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that creates all tensors of its block on a worker.

    Operations on existing tensors still run on the worker of their operands.

    Args:
        number: the number of the worker.

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
        # torch.tensor([...]) creates its tensor with this operation, from data of the local process.
        if func is aten.lift_fresh.default:
            return move(args[0], self._node)

        # An operation that has no operands and returns a tensor is a factory. Run other operations as usual.
        returns = func._schema.returns
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        if has_tensors or not returns or str(returns[0].type) != "Tensor":
            return func(*args, **(kwargs or {}))

        return dispatch(func, args, kwargs or {}, self._node)


def factory(name: str) -> Callable[..., torch.Tensor]:
    """Return a form of torch's function `name`, such as `zeros`, that creates its tensor on worker `node`."""
    torch_factory = getattr(torch, name)

    def create(*args: Any, node: int, device: str | None = None, **kwargs: Any) -> torch.Tensor:
        with Placement(node):
            tensor: Any = torch_factory(*args, **kwargs)

        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"torch.{name} returns no tensor.", hint="Call it on a worker: remote.call().")
        # A function such as `stack` has made the tensor in this process, from local tensors. Send it to the
        # worker.
        if not isinstance(tensor, RemoteTensor):
            tensor = send(tensor, node)

        if device is not None:
            tensor = tensor.to(device)
        placed: torch.Tensor = tensor
        return placed

    # If `node` is missing, Python's TypeError shows this name.
    create.__qualname__ = f"remote.{name}"
    return create


def send(tensor: torch.Tensor, node: int) -> torch.Tensor:
    """Copy a tensor to worker `node`, and return the remote tensor; autograd copies the gradient back.

    `tensor.dist_send(node=1)` is another form of the call. A tensor of another worker is copied directly, not
    through this process.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"remote.send takes a tensor, not {tensor!r:.80}.", hint="Use torch.tensor(...).")
    return move(tensor, _current(node))


def module(model: Model, node: int) -> Model:
    """Return a copy of a model on worker `node`, whose forward pass creates new tensors there too.

    Optimizers, hooks and `state_dict` work as on a local model. `model.load_state_dict(copy.state_dict())`
    copies the weights back.

    Example:
        model = remote.module(torch.nn.Linear(8, 1), node=1)
        model(torch.randn(4, 8).dist_send(node=1)).sum().backward()
    """
    remote_tensors: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        remote_tensor = send(tensor.detach(), node)
        if isinstance(tensor, torch.nn.Parameter):
            remote_tensor = torch.nn.Parameter(remote_tensor, tensor.requires_grad)
        remote_tensors[id(tensor)] = remote_tensor

    # Pass the remote tensors as the memo, so that deepcopy uses them in place of copies.
    placed = copy.deepcopy(model, remote_tensors)

    class OnWorker(type(placed)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with Placement(node):
                return super().forward(*args, **kwargs)

    # Keep the name of the model's class in messages.
    OnWorker.__name__ = OnWorker.__qualname__ = type(placed).__name__
    placed.__class__ = OnWorker

    return placed


def call(function: str, *args: Any, node: int, **kwargs: Any) -> Owned:
    """Call a function on worker `node`, without waiting.

    Args:
        function: the import path of the function; only the path goes to the worker, never code.
        *args: numbers, strings, lists, dicts, tensors of the worker, and results of calls on the worker.
        node: the number of the worker.
        **kwargs: as `args`.

    Returns:
        A reference to the result, which may be an argument of further calls on the worker. Its `fetch` waits
        for the result, and returns a remote tensor or a copy of a plain value.

    Example:
        env = remote.call("my_project.environment.make", "maze", node=1)
        steps = remote.call("my_project.environment.play", env, policy, node=1).fetch()
    """
    if not isinstance(function, str):
        raise ConfigError(
            f"remote.call takes an import path, not {function!r}.",
            hint="Put the function into a module that the workers can import: 'my_project.module.function'.",
        )

    result = _current(node).new()
    result.node.run(result.number, function, without_dicts(args), without_dicts(list(kwargs.items())))

    return result


class Event:
    """A point in the sequence of a worker's commands, for which other workers and the script can wait.

    `remote.record_event(node=1)` creates it.
    """

    def __init__(self, node: int) -> None:
        self._node = _current(node)
        self._name = f"controller/event/{secrets.token_hex(8)}"
        self._node.run([None], collective.reach, [self._name])

    def wait(self, node: int) -> None:
        """Let the later commands of worker `node` wait until the event's worker has reached the event."""
        other = _current(node)
        if other is not self._node:
            other.run([None], collective.wait_for, [self._name])

    def synchronize(self) -> None:
        """Wait in this process until the event's worker has run all commands that are queued now."""
        self._node.ask("count")
