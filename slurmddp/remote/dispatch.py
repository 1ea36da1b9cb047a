"""Tensors that live on a worker: every operation of torch on them is put into the worker's queue.

torch hands each operation to `__torch_dispatch__`, below autograd. The shapes of the results follow from a
run on meta tensors, before the worker has run anything, so a wrong shape is an error here. The next call of
the operation on operands of the same shapes finds them in a table.
"""

# The methods of a remote tensor take less than those that torch's stub declares.
# mypy: disable-error-code="override, assignment"
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree as pytree

from slurmddp.errors import ConfigError
from slurmddp.remote import collective
from slurmddp.remote.connection import Node, Owned, misplaced

aten = torch.ops.aten
_PLANS_KEPT = 20_000
_NUMBERS = bool, float, complex
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose results' shapes may depend on the values of their operands."""
_FOLLOWS_OPERANDS = ("device", "layout", "pin_memory")
"""Arguments that are dropped, because results are where the operands are."""
_ALIASES = aten.detach.default, aten.alias.default
_COPY = aten.copy_.default
_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose second argument, the indices, may be in this process, as torch takes it for a GPU."""
_IN_PLACE = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""For operations that change a shape in place: the operation that returns a view of the changed shape."""
_BASE_ELEMENTS = 1 << 48
"""Size of the meta tensor of which each operand is a view; it takes no memory."""


class Meta(NamedTuple):
    """The facts of a tensor on a worker."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_conjugate: bool
    device: str

    @staticmethod
    def of(tensor: torch.Tensor, device: str) -> Meta:
        """Return the facts of a tensor here, for a tensor on a worker's `device`."""
        layout = tensor.stride(), tensor.dtype, int(tensor.storage_offset()), tensor.is_conj()
        return Meta(tuple(tensor.shape), *layout, device)

    def tensor(self) -> torch.Tensor:
        """Return a tensor with these facts and no data."""
        base = torch.empty(_BASE_ELEMENTS, dtype=self.dtype, device="meta")
        found = base.as_strided(self.shape, self.stride, self.offset)
        return found.conj() if self.is_conjugate else found


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
        if facts.is_conjugate:
            torch._C._set_conj(made, True)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def get_node(self) -> int:
        """Return the number of the worker that holds this tensor."""
        return int(self.reference.node.number)

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
        must_copy = kwargs.pop("copy", False)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        found = self if device is None else self._to_device(device)
        # A tensor that has moved is a copy already.
        options: Any = {"copy": must_copy and found is self, "memory_format": memory_format}
        return torch.Tensor.to(found, dtype=dtype or self.dtype, **options)

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

    def tolist(self) -> Any:
        return self.fetch().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.fetch().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.meta.device}"
        return f"RemoteTensor(node={self.get_node()}, {facts})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and not self.dim() else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        made.grad = copy.deepcopy(self.grad, memo)
        return memo.setdefault(id(self), made.requires_grad_(self.requires_grad))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{self!r} has no data here.", hint="Use its copy in this process: x.fetch().")

    data_ptr = untyped_storage = apply_ = map_ = share_memory_ = __dlpack__ = __dlpack_device__ = _refuse
    __reduce_ex__ = _refuse  # By which torch.save and pickle ask for the data.


def described(node: Node, content: Sequence[Any]) -> RemoteTensor:
    """Return the tensor that a worker has described in a reply."""
    number, shape, stride, *more = content
    return RemoteTensor(Meta(tuple(shape), tuple(stride), *more), Owned(node, number))


# --- copies from place to place


class _Move(torch.autograd.Function):
    """A copy to another place; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, node: Node | None, device: str) -> torch.Tensor:
        ctx.source = _node_of(tensor), str(tensor.device)
        return _copy(tensor, node, device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return move(gradient, *ctx.source), None, None


def move(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    """Return a copy of a local or remote tensor at `node`; None stands for this process."""
    moved: torch.Tensor = _Move.apply(tensor, node, device)  # type: ignore[no-untyped-call]
    return moved


def _node_of(tensor: torch.Tensor) -> Node | None:
    return tensor.reference.node if isinstance(tensor, RemoteTensor) else None


def _copy(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    source = _node_of(tensor)
    if node is None:
        return (tensor if source is None else source.ask("fetch", tensor)).to(device)
    if tensor.layout is not torch.strided:
        raise ConfigError(f"A {tensor.layout} tensor can't go to a worker.", hint="Send x.to_dense().")
    like = torch.empty_like(Meta.of(tensor, device).tensor())
    made = RemoteTensor(Meta.of(like, device), node.new())
    number = made.reference.number
    if source is None:
        node.put(number, tensor, device)
    elif source is node:
        node.run([number], "torch.Tensor.to", [tensor, device], [("copy", True)])
    else:
        facts = [("dtype", tensor.dtype), ("device", torch.device(device))]
        node.run(number, "torch.empty_strided", [made.meta.shape, made.meta.stride], facts)
        exchange("copy", [[tensor], [made]], node=source.number)
    return made


def exchange(kind: str, parts: list[list[Any]], op: str | None = None, node: int | None = None) -> None:
    """Let workers take part in a collective of their tensors, without waiting; see `collective.run`.

    Raises WorkerLostError if one of the workers is gone: the others would wait for it.
    """
    parts = sorted(parts, key=lambda part: part[0].get_node())
    workers = [part[0].reference.node for part in parts]
    for worker in workers:
        worker.check()
    device = "cpu" if any(one.get_device() == "cpu" for part in parts for one in part) else "cuda"
    args = [worker.number for worker in workers], device, op, node
    for worker, part in zip(workers, parts, strict=True):
        changes = node is None or (worker.number == node) == (kind == "reduce")
        changed = [one.reference.number if changes else None for one in part]
        worker.run(changed, collective.run, [kind, part, *args, changes])


# --- operations


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: Node | None = None) -> Any:
    """Put one operation into the queue of the worker of its operands, else of `node`; return its results.

    Raises:
        ConfigError: the operands are in several places.
        RuntimeError: torch's own error for operands whose shapes or dtypes don't fit.
    """
    if func in _ALIASES:
        return RemoteTensor(args[0].meta, args[0].reference)
    if func is _COPY:  # The one operation that may cross places.
        target, source, *_ = args
        if not isinstance(target, RemoteTensor):
            return target.copy_(_copy(source, None))
        if _node_of(source) is not target.reference.node:
            args = target, _copy(source, target.reference.node, target.meta.device)
    elif func in _IN_PLACE:  # An alias of the tensor keeps its shape on the worker.
        args[0].data = dispatch(_IN_PLACE[func], args, kwargs)
        return args[0]
    elif func in _INDEX:
        args = args[0], [_beside(args[0], one) for one in args[1]], *args[2:]
    operands: list[Any] = []
    place = kwargs.get("device") or "cpu"
    if kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOLLOWS_OPERANDS}
    if node is not None:
        kwargs = {**kwargs, "device": torch.device(place)}
    # A size may follow from a number such as the 0.1 of arange(0, 1, 0.1).
    exact = node is not None or "upsample" in func._schema.name
    given = *kwargs, _key(args, operands, exact), _key([*kwargs.values()], operands, exact)
    key = func, torch.get_default_dtype(), *given
    node = node or common_node(func, operands)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plans[key] = _plan(func, args, kwargs, operands)
    return plan.run(node, args, kwargs, operands)


def _beside(target: torch.Tensor, index: Any) -> Any:
    """Return an index that is here as a copy beside its remote target."""
    if index is None or isinstance(index, RemoteTensor) or not isinstance(target, RemoteTensor):
        return index
    return _copy(index, target.reference.node, target.meta.device)


def common_node(what: Any, operands: Sequence[Any]) -> Node:
    """Return the worker that holds all operands; raise ConfigError about `what` if they lie in two places."""
    first = next((one for one in operands if isinstance(one, RemoteTensor)), operands[0])
    for other in operands:
        if not isinstance(other, RemoteTensor) or other.reference.node is not first.reference.node:
            raise misplaced(str(what), first, other)
    node: Node = first.reference.node
    return node


def _key(value: Any, operands: list[Any], exact: bool) -> Any:
    """Return the part of a value on which the shapes of results depend; add tensors to `operands`."""
    kind = type(value)
    if kind is RemoteTensor:
        operands.append(value)
        return value.meta
    if kind in _NUMBERS:  # In a table, True and 1.0 would equal 1.
        return (kind, value) if exact or kind is bool else kind
    if isinstance(value, (list, tuple)):
        return tuple([_key(one, operands, exact) for one in value])
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return torch.Tensor, value.dtype
        operands.append(value)
    return value


@dataclass
class _Plan:
    """The results of an operation on operands of certain shapes.

    Attributes:
        command: the operation, as the worker finds it.
        leaves: for each result the facts of a new tensor, or the position of the operand that it is, or None.
        structure: how the leaves make up the results; None: only the worker knows the results.
    """

    command: str
    leaves: Sequence[Meta | int | None] = ()
    structure: Any = None

    def run(self, node: Node, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> Any:
        """Put the operation into the queue of `node`, and return its results."""
        named = list(kwargs.items())
        if self.structure is None:
            whole = node.new()
            node.run(whole.number, self.command, args, named)
            return whole.fetch()
        results = [
            RemoteTensor(leaf, node.new())
            if isinstance(leaf, Meta)
            else (None if leaf is None else operands[leaf])
            for leaf in self.leaves
        ]
        numbers = [None if one is None else one.reference.number for one in results]
        node.run(numbers, self.command, args, named)
        return pytree.tree_unflatten(results, self.structure)


_plans: dict[Any, _Plan] = {}


def _plan(func: Any, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> _Plan:
    """Run an operation on meta tensors and return the plan for its results."""
    metas: list[torch.Tensor] = []

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, RemoteTensor):
            return torch.empty((), dtype=tensor.dtype, device="meta")
        metas.append(tensor.meta.tensor())  # In the order of `_key`.
        return metas[-1]

    arguments = func._schema.arguments
    given = {**dict(zip([one.name for one in arguments], args, strict=False)), **kwargs}
    for changed in pytree.tree_leaves([given.get(one.name) for one in arguments if one.is_write]):
        if isinstance(changed, torch.Tensor) and not isinstance(changed, RemoteTensor):
            raise misplaced(str(func), changed, *operands[:1])
    unnamed, named = pytree.tree_map_only(torch.Tensor, without_data, (args, dict(kwargs)))
    plan = _Plan(f"torch.ops.{func}")
    try:
        found = func(*unnamed, **{name: "meta" if name == "device" else one for name, one in named.items()})
    except Exception as error:
        if isinstance(error, NotImplementedError) or _BY_VALUES & set(func.tags):
            return plan
        raise
    leaves, structure = pytree.tree_flatten(found)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if not tensors and func._schema.returns:
        return plan
    # A factory says its device. A single number may be on the CPU.
    device = str(kwargs.get("device") or max(operands, key=torch.Tensor.dim).meta.device)
    plan.leaves = [None if one is None else _leaf(func, one, metas, operands, device) for one in leaves]
    plan.structure = structure
    return plan


def _leaf(func: Any, result: Any, metas: Sequence[Any], operands: Sequence[Any], device: str) -> Meta | int:
    """Return the facts of a new tensor, or the position of the operand that was changed in place."""
    position = next((at for at, one in enumerate(metas) if one is result), None)
    if position is None:
        return Meta.of(result, device)
    before = operands[position].meta
    if Meta.of(result, before.device) != before:
        raise ConfigError(
            f"{func} would change a remote tensor of shape {before.shape} in place to {tuple(result.shape)}.",
            hint="Use the form that returns a new tensor, such as x.reshape() for x.resize_().",
        )
    return position
