"""Tensors that live on a worker: every operation of torch on them is put into the worker's queue.

torch hands each operation to `__torch_dispatch__`, below autograd. The shapes of the results follow from a
run on meta tensors, before the worker has run anything, so a wrong shape is an error here. The next call of
the operation on operands of the same shapes finds them in a table.
"""

# The methods of a remote tensor take less than those that torch's stub declares.
# mypy: disable-error-code="override, assignment"
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.utils import _pytree as pytree

from slurmddp.errors import ConfigError
from slurmddp.remote.connection import Node, Owned, misplaced

aten = torch.ops.aten
_PLANS_KEPT = 20_000
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose results' shapes may depend on the values of their operands."""
_FOLLOWS_OPERANDS = ("device", "layout", "pin_memory")
"""Arguments that are dropped, because results are where the operands are."""


@dataclass(frozen=True, eq=False)
class Meta:
    """The facts of a tensor on a worker; `meta` mostly returns one object for equal facts."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: str

    def tensor(self) -> torch.Tensor:
        """Return a tensor with these facts and no data."""
        extent = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        base = torch.empty(max(0, self.offset + extent + 1), dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.stride, self.offset)


meta = lru_cache(1 << 16)(Meta)


def meta_like(tensor: torch.Tensor, device: str) -> Meta:
    """Return the facts of a tensor here, for a tensor on a worker's `device`."""
    return meta(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset(), device)


def contiguous(shape: Sequence[int], dtype: torch.dtype, device: str) -> Meta:
    """Return the facts of a new tensor of this shape."""
    steps = accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1)
    return meta(tuple(shape), tuple(steps)[::-1] if shape else (), dtype, 0, device)


class RemoteTensor(torch.Tensor):
    """A tensor on a worker. It has no data here; `fetch` copies the data to this process."""

    meta: Meta
    reference: Owned
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, facts: Meta, reference: Owned) -> RemoteTensor:
        made: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls, facts.shape, strides=facts.stride, storage_offset=facts.offset, dtype=facts.dtype
        )
        made.meta, made.reference = facts, reference
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def get_node(self) -> int:
        """Return the number of the worker that holds this tensor."""
        return self.reference.node.number

    def get_device(self) -> str:  # torch's own returns the index of a GPU.
        """Return the device on that worker: `cpu`, `cuda:0`, ..."""
        return self.meta.device

    @property
    def device(self) -> torch.device:
        return torch.device(self.meta.device)

    def fetch(self) -> torch.Tensor:
        """Wait for the worker and copy this tensor to this process; gradients go back the same way.

        Returns:
            A local CPU tensor of the same shape and dtype.

        Raises:
            RemoteError: an operation has failed on the worker.
            WorkerLostError: the worker is gone.
        """
        return move(self, None)

    cpu = fetch

    def cuda(self, device: Any = None, **_: Any) -> torch.Tensor:
        """Copy to the GPU of the worker, or to GPU `device`; raises ConfigError if the worker has none."""
        return self._to_device(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert dtype or device as torch does; the tensor stays on its worker."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        found = self if device is None else self._to_device(device)
        if dtype in (None, self.dtype) and memory_format is None:
            return found
        kept: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
        return torch.Tensor.to(found, dtype=dtype or self.dtype, **kept)

    def _to_device(self, asked: Any) -> torch.Tensor:
        device, node = torch.device(asked), self.reference.node
        if device.type == "cuda" and node.device == "cpu":
            raise ConfigError(
                f"{device} was asked for, and worker {node.number} on {node.host} has no GPU.",
                hint="Leave out .cuda(), or start the workers where there are GPUs.",
            )
        name = node.device if device == torch.device("cuda") else str(device)
        return self if name == self.meta.device else move(self, node, name)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.meta, self.reference = value.meta, value.reference

    def item(self) -> Any:
        return _copy(self, None).item()

    def tolist(self) -> Any:
        return _copy(self, None).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.fetch().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.meta.device}"
        return f"RemoteTensor(node={self.get_node()}, {facts})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        return memo.setdefault(id(self), made.requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(f"{self!r} can't be pickled or saved.", hint="Save its copy here: x.fetch().")


# --- copies from place to place


class _Move(torch.autograd.Function):
    """A copy to another place; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, node: Node | None, device: str) -> torch.Tensor:
        ctx.source = _node_of(tensor), str(tensor.device)
        return _copy(tensor, node, device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _copy(gradient, *ctx.source), None, None


def move(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    """Return a copy of a local or remote tensor at `node`; None stands for this process."""
    moved: torch.Tensor = _Move.apply(tensor, node, device)  # type: ignore[no-untyped-call]
    return moved


def _node_of(tensor: torch.Tensor) -> Node | None:
    return tensor.reference.node if isinstance(tensor, RemoteTensor) else None


def _copy(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    if not isinstance(tensor, RemoteTensor):
        if node is None:
            return tensor.to(device)
        sent = RemoteTensor(contiguous(tensor.shape, tensor.dtype, "cpu"), node.put(tensor))
        return sent if device == "cpu" else _copy(sent, node, device)
    source = tensor.reference.node
    if node is None:
        fetched: torch.Tensor = source.ask("fetch", tensor.reference)
        return fetched.to(device)
    made = RemoteTensor(contiguous(tensor.shape, tensor.dtype, device), node.new())
    if source is node:
        node.run("move", [made.reference.number], tensor, device)
    else:
        node.check()  # Else the source would wait for a lost worker.
        source.run("give", [], tensor, node.number)
        facts = [list(tensor.shape), tensor.dtype, device]
        node.run("take", [made.reference.number], source.number, *facts)
    return made


# --- operations


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: Node | None = None) -> Any:
    """Put one operation into the queue of the worker of its operands, else of `node`; return its results.

    Raises:
        ConfigError: the operands are in several places.
        RuntimeError: torch's own error for operands whose shapes or dtypes don't fit.
    """
    own = _OWN.get(func)
    return own(*args, **kwargs) if own is not None else _enqueue(func, args, kwargs, node)


def _enqueue(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: Node | None) -> Any:
    operands: list[Any] = []
    device = str(kwargs.get("device") or "cpu") if node is not None else ""
    if kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOLLOWS_OPERANDS}
    # A size may follow from a number such as the 0.1 of arange(0, 1, 0.1).
    exact = node is not None or "upsample" in func._schema.name
    key = func, device, _key(args, operands, exact), *kwargs, _key([*kwargs.values()], operands, exact)
    node = node or _common_node(func, operands)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plans[key] = _plan(func, args, kwargs, operands, device)
    return plan.run(node, args, kwargs, operands)


def _common_node(func: Any, operands: Sequence[Any]) -> Node:
    """Return the worker of all operands."""
    first = next(one for one in operands if isinstance(one, RemoteTensor))
    for other in operands:
        if not isinstance(other, RemoteTensor) or other.reference.node is not first.reference.node:
            raise misplaced(str(func), first, other)
    return first.reference.node


def _key(value: Any, operands: list[Any], exact: bool) -> Any:
    """Return the part of a value on which the shapes of results depend; add tensors to `operands`."""
    kind = type(value)
    if kind is RemoteTensor:
        operands.append(value)
        return value.meta
    if kind is float:
        return value if exact else float
    if kind is bool:
        return bool, value  # In a table, True would equal 1.
    if isinstance(value, (list, tuple)):
        return tuple([_key(one, operands, exact) for one in value])
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return torch.Tensor, value.dtype
        operands.append(value)
    return value


@dataclass(frozen=True)
class _Operand:
    """A result that is the operand at this position, changed in place."""

    position: int


@dataclass
class _Plan:
    """The results of an operation on operands of certain shapes.

    Attributes:
        func: the operation.
        leaves: for each result the facts of a new tensor, the operand that it is, or a plain value.
        structure: how the leaves make up the results; None: only the worker knows the results.
        more: further arguments for the worker.
    """

    func: Any
    leaves: Sequence[Any] = ()
    structure: Any = None
    more: dict[str, Any] = field(default_factory=dict)

    def run(self, node: Node, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> Any:
        """Put the operation into the queue of `node`, and return its results."""
        command = str(self.func), args, [*kwargs.items(), *self.more.items()]
        if self.structure is None:
            whole = node.new()
            node.run("op", whole.number, *command)
            found = node.ask("describe", whole)
            return tuple(found) if len(self.func._schema.returns) > 1 else found
        results = [
            RemoteTensor(leaf, node.new())
            if isinstance(leaf, Meta)
            else (operands[leaf.position] if isinstance(leaf, _Operand) else leaf)
            for leaf in self.leaves
        ]
        numbers = [one.reference.number if isinstance(one, RemoteTensor) else None for one in results]
        node.run("op", numbers, *command)
        return results[0] if self.structure.is_leaf() else pytree.tree_unflatten(results, self.structure)


def _plan(func: Any, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any], device: str) -> _Plan:
    """Run an operation on meta tensors and return the plan for its results.

    `device` is where a factory puts its result; it is empty for an operation on operands.
    """
    metas: list[torch.Tensor] = []
    more: dict[str, Any] = {"device": torch.device(device)} if device else {}
    where = {"device": "meta"} if device else {}
    unnamed = _without_data(args, metas)  # In the order of `_key`: arguments without names first.
    named = {name: _without_data(value, metas) for name, value in kwargs.items()}
    try:
        leaves, structure = pytree.tree_flatten(func(*unnamed, **named, **where))
    except Exception as error:
        if isinstance(error, NotImplementedError) or _BY_VALUES & set(func.tags):
            return _Plan(func, more=more)
        raise
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if not tensors and func._schema.returns:
        return _Plan(func, more=more)
    if device:
        more["dtype"] = tensors[0].dtype  # The default of a worker may be another one.
    elif tensors:
        device = max(operands, key=torch.Tensor.dim).meta.device  # A single number may be on the CPU.
    return _Plan(func, [_outcome(func, one, metas, operands, device) for one in leaves], structure, more)


def _without_data(value: Any, metas: list[torch.Tensor]) -> Any:
    """Return `value` with a new meta tensor for each tensor; add those of operands to `metas`."""
    if isinstance(value, (list, tuple)):
        return [_without_data(one, metas) for one in value]
    if isinstance(value, RemoteTensor):
        metas.append(value.meta.tensor())
        return metas[-1]
    return torch.empty((), dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def _outcome(
    func: Any, leaf: Any, metas: Sequence[torch.Tensor], operands: Sequence[Any], device: str
) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    position = next((at for at, one in enumerate(metas) if one is leaf), None)
    if position is None:
        return meta_like(leaf, device)
    before = operands[position].meta
    # `meta` forgets facts that were long unused, so equal facts may be two objects.
    if vars(meta_like(leaf, before.device)) != vars(before):
        raise ConfigError(
            f"{func} would change a remote tensor of shape {before.shape} in place to {tuple(leaf.shape)}.",
            hint="Use the form that returns a new tensor, such as x.t() for x.t_().",
        )
    return _Operand(position)


def _alias(tensor: RemoteTensor) -> RemoteTensor:
    return RemoteTensor(tensor.meta, tensor.reference)


def _copy_into(target: torch.Tensor, source: torch.Tensor, *more: Any) -> Any:
    """Copy in place, from any place: a copy is the one operation that may cross places."""
    if not isinstance(target, RemoteTensor):
        return target.copy_(_copy(source, None))
    if _node_of(source) is not target.reference.node:
        source = _copy(source, target.reference.node, target.meta.device)
    return _enqueue(aten.copy_.default, (target, source), {}, None)


_plans: dict[Any, _Plan] = {}
_OWN: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.copy_.default: _copy_into,
}


def describe(node: Node, tag: str, content: Sequence[Any]) -> RemoteTensor:
    """Return the tensor that a worker has described in a reply."""
    number, shape, stride, dtype, offset, device = content
    return RemoteTensor(meta(tuple(shape), tuple(stride), dtype, offset, device), Owned(node, number))
