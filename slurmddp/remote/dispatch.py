"""Queue torch's operations on remote tensors as commands of the worker that holds the tensors.

torch hands each operation to `__torch_dispatch__`, below autograd. The operation first runs on meta tensors
in this process, to find the shapes of its results. So operands of wrong shapes raise an error in the line of
the call. A plan of the results is cached for the next call on operands of the same shapes.
"""

# The methods of a remote tensor take fewer arguments than torch's stub declares.
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
"""torch's tags for operations whose results have shapes that may depend on the values of their operands."""
_FOLLOWS_OPERANDS = ("device", "layout", "pin_memory")
"""Names of arguments that are not sent, because the worker creates results where the operands are."""
_ALIASES = aten.detach.default, aten.alias.default
_COPY = aten.copy_.default
_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose second argument, the indices, may be in this process, as torch allows for GPUs."""
_IN_PLACE = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""For each operation that changes a shape in place, the operation that returns a view of that shape."""
_BASE_ELEMENTS = 1 << 48
"""Number of elements of the meta tensor from which `Meta.tensor` takes views; it needs no memory."""


class Meta(NamedTuple):
    """Shape, layout, dtype and device of a tensor on a worker."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_conjugate: bool
    device: str

    @staticmethod
    def of(tensor: torch.Tensor, device: str) -> Meta:
        """Return the Meta that `tensor` would have on the device `device` of a worker."""
        return Meta(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.is_conj(),
            device,
        )

    def tensor(self) -> torch.Tensor:
        """Return a meta tensor of this shape, layout and dtype."""
        base = torch.empty(_BASE_ELEMENTS, dtype=self.dtype, device="meta")
        view = base.as_strided(self.shape, self.stride, self.offset)
        return view.conj() if self.is_conjugate else view


class RemoteTensor(torch.Tensor):
    """Tensor whose data is on a worker. Operations on it run there; `fetch` copies it to this process."""

    meta: Meta
    reference: Owned
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, facts: Meta, reference: Owned) -> RemoteTensor:
        tensor: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls, facts.shape, strides=facts.stride, storage_offset=facts.offset, dtype=facts.dtype
        )
        tensor.meta = facts
        tensor.reference = reference
        if facts.is_conjugate:
            torch._C._set_conj(tensor, True)

        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def get_node(self) -> int:
        """Return the number of the worker that holds this tensor."""
        return int(self.reference.node.number)

    # This differs from torch's method, which returns the index of a GPU.
    def get_device(self) -> str:
        """Return the device on the worker: `cpu`, `cuda:0`, ..."""
        return self.meta.device

    @property
    def device(self) -> torch.device:
        return torch.device(self.meta.device)

    def fetch(self) -> torch.Tensor:
        """Wait for the worker, and copy this tensor to this process; autograd copies the gradient back.

        Returns:
            A local CPU tensor of the same shape and dtype.

        Raises:
            RemoteError: an operation has failed on the worker.
            WorkerLostError: the worker is gone.
        """
        return move(self, None)

    cpu = fetch

    def cuda(self, device: Any = None, **_: Any) -> torch.Tensor:
        """Return a copy of this tensor on the worker's GPU, or on the GPU `device` of its machine.

        Raises:
            ConfigError: the worker has no GPU.
        """
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self._to_device(device or "cuda")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert dtype and device as `torch.Tensor.to` does; the device is one of the tensor's worker."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])

        must_copy = kwargs.pop("copy", False)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        moved = self if device is None else self._to_device(device)
        # A tensor that was moved to another device is a copy already.
        options: Any = {"copy": must_copy and moved is self, "memory_format": memory_format}

        return torch.Tensor.to(moved, dtype=dtype or self.dtype, **options)

    def _to_device(self, target: Any) -> torch.Tensor:
        device = torch.device(target)
        node = self.reference.node
        if device.type == "cuda" and node.device == "cpu":
            raise ConfigError(
                f"{device} was asked for, and worker {node.number} on {node.host} has no GPU.",
                hint="Leave out .cuda(), or start the workers where there are GPUs.",
            )

        # "cuda" without an index means the GPU of the worker.
        name = node.device if device == torch.device("cuda") else str(device)
        return self if name == self.meta.device else move(self, node, name)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.meta = value.meta
        self.reference = value.reference

    def tolist(self) -> Any:
        return self.fetch().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.fetch().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.meta.device}"
        return f"RemoteTensor(node={self.get_node()}, {facts})"

    def __format__(self, spec: str) -> str:
        # As for a local tensor, a specification such as `.3f` formats the number in a 0-dim tensor.
        return format(self.item() if spec and not self.dim() else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        copied.grad = copy.deepcopy(self.grad, memo)
        return memo.setdefault(id(self), copied.requires_grad_(self.requires_grad))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{self!r} has no data in this process.", hint="Copy it to this process first: x.fetch()."
        )

    data_ptr = untyped_storage = apply_ = map_ = share_memory_ = __dlpack__ = __dlpack_device__ = _refuse
    # torch.save and pickle call this method to get the data.
    __reduce_ex__ = _refuse


def described(node: Node, content: Sequence[Any]) -> RemoteTensor:
    """Return the remote tensor that the worker `node` describes in a reply by `content`."""
    number, shape, stride, *other_facts = content
    return RemoteTensor(Meta(tuple(shape), tuple(stride), *other_facts), Owned(node, number))


# --- functions that copy tensors between workers and this process


class _Move(torch.autograd.Function):
    """Autograd function that copies a tensor to a worker or to this process, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, node: Node | None, device: str) -> torch.Tensor:
        ctx.source = _node_of(tensor), str(tensor.device)
        return _copy(tensor, node, device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return move(gradient, *ctx.source), None, None


def move(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    """Copy a tensor to a worker or to this process; autograd copies its gradient back.

    Args:
        tensor: a local or remote tensor.
        node: the worker that gets the copy. None: this process.
        device: the device of the copy.
    """
    moved: torch.Tensor = _Move.apply(tensor, node, device)  # type: ignore[no-untyped-call]
    return moved


def _node_of(tensor: torch.Tensor) -> Node | None:
    return tensor.reference.node if isinstance(tensor, RemoteTensor) else None


def _copy(tensor: torch.Tensor, node: Node | None, device: str = "cpu") -> torch.Tensor:
    source = _node_of(tensor)
    if node is None:
        local: torch.Tensor = tensor if source is None else source.ask("fetch", tensor)
        return local.to(device)

    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"A {tensor.layout} tensor can't go to a worker.", hint="Send a dense tensor: x.to_dense()."
        )

    # Find the strides of the copy as torch does, by a meta tensor.
    like = torch.empty_like(Meta.of(tensor, device).tensor())
    copied = RemoteTensor(Meta.of(like, device), node.new())
    number = copied.reference.number
    if source is None:
        node.put(number, tensor, device)
    elif source is node:
        node.run([number], "torch.Tensor.to", [tensor, device], [("copy", True)])
    else:
        facts = [("dtype", tensor.dtype), ("device", torch.device(device))]
        node.run(number, "torch.empty_strided", [copied.meta.shape, copied.meta.stride], facts)
        exchange("copy", [[tensor], [copied]], node=source.number)

    return copied


def exchange(kind: str, parts: list[list[Any]], op: str | None = None, node: int | None = None) -> None:
    """Queue a collective (`collective.run`) on the workers of its tensors, without waiting.

    Args:
        kind: the collective.
        parts: the tensors of each worker.
        op: the name of the reduction. None: `kind` is no reduction.
        node: the worker that sends, or that receives a reduction; None: all workers receive.

    Raises:
        WorkerLostError: a worker is gone, so that the other workers would wait for it.
    """
    parts = sorted(parts, key=lambda part: part[0].get_node())
    workers = [part[0].reference.node for part in parts]
    for worker in workers:
        worker.check()

    nodes = [worker.number for worker in workers]
    is_on_cpu = any(tensor.get_device() == "cpu" for part in parts for tensor in part)
    device = "cpu" if is_on_cpu else "cuda"
    for worker, part in zip(workers, parts, strict=True):
        changes = node is None or (worker.number == node) == (kind == "reduce")
        results = [tensor.reference.number if changes else None for tensor in part]
        worker.run(results, collective.run, [kind, part, nodes, device, op, node, changes])


# --- functions that run torch's operations on workers


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], node: Node | None = None) -> Any:
    """Queue an operation on the worker of its operands, and return its results as remote tensors.

    It waits for the worker only if the results are not tensors, or their shapes depend on values.

    Args:
        func: an operation of `torch.ops`.
        args: the positional arguments.
        kwargs: the named arguments.
        node: the worker that runs an operation without operands, such as `zeros`. None: the worker of the
            operands.

    Raises:
        ConfigError: the operands are not on one worker.
        RuntimeError: torch's error for operands whose shapes or dtypes don't fit.
    """
    if func in _ALIASES:
        return RemoteTensor(args[0].meta, args[0].reference)

    # copy_ is the only operation whose operands may be on different workers or in this process.
    if func is _COPY:
        target, source, *_ = args
        if not isinstance(target, RemoteTensor):
            return target.copy_(_copy(source, None))
        if _node_of(source) is not target.reference.node:
            args = target, _copy(source, target.reference.node, target.meta.device)
    elif func in _IN_PLACE:
        # Give the tensor a view of the new shape. On the worker, other aliases of it keep their shape.
        args[0].data = dispatch(_IN_PLACE[func], args, kwargs)
        return args[0]
    elif func in _INDEX:
        args = args[0], [_beside(args[0], index) for index in args[1]], *args[2:]

    operands: list[Any] = []
    place = kwargs.get("device") or "cpu"
    if kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOLLOWS_OPERANDS}
    if node is not None:
        kwargs = {**kwargs, "device": torch.device(place)}

    # Plans of factories and of upsampling depend on exact numbers: the 0.1 determines the size of arange(0,
    # 1, 0.1).
    exact = node is not None or "upsample" in func._schema.name
    args_key = _key(args, operands, exact)
    kwargs_key = _key([*kwargs.values()], operands, exact)
    key = func, torch.get_default_dtype(), *kwargs, args_key, kwargs_key
    if node is None:
        node = common_node(func, operands)

    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plan(func, args, kwargs, operands)
        _plans[key] = plan

    return plan.run(node, args, kwargs, operands)


def _beside(target: torch.Tensor, index: Any) -> Any:
    """Return `index` on the worker of `target`: a copy if it is in this process, otherwise `index` itself."""
    if index is None or isinstance(index, RemoteTensor) or not isinstance(target, RemoteTensor):
        return index
    return _copy(index, target.reference.node, target.meta.device)


def common_node(what: Any, operands: Sequence[Any]) -> Node:
    """Return the worker that has all operands of the operation `what`.

    Raises:
        ConfigError: an operand is on another worker or in this process.
    """
    first = next((operand for operand in operands if isinstance(operand, RemoteTensor)), operands[0])
    for other in operands:
        if not isinstance(other, RemoteTensor) or other.reference.node is not first.reference.node:
            raise misplaced(str(what), first, other)

    node: Node = first.reference.node
    return node


def _key(value: Any, operands: list[Any], exact: bool) -> Any:
    """Return the part of a plan's key for an argument: all that the shapes of results may depend on.

    Args:
        value: the argument.
        operands: a list to which the tensors in `value` are added.
        exact: whether shapes may depend on the values of numbers, and not only on their types.
    """
    kind = type(value)
    if kind is RemoteTensor:
        operands.append(value)
        return value.meta

    # Include the type, because True and 1.0 equal 1 as keys.
    if kind in _NUMBERS:
        return (kind, value) if exact or kind is bool else kind
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, operands, exact) for item in value])

    if isinstance(value, torch.Tensor):
        if not value.dim():
            return torch.Tensor, value.dtype
        operands.append(value)

    return value


@dataclass
class _Plan:
    """The results of an operation for operands of certain shapes, known before the worker has run it.

    Attributes:
        command: the import path of the operation, for the worker.
        leaves: for each result the Meta of a new tensor, or the index of the operand that the operation
            changes in place, or None.
        structure: torch's tree structure of the results. None: only the worker can find the results.
    """

    command: str
    leaves: Sequence[Meta | int | None] = ()
    structure: Any = None

    def run(self, node: Node, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> Any:
        """Queue the operation on `node`, and return its results; wait for them if `structure` is None."""
        named = list(kwargs.items())
        if self.structure is None:
            result = node.new()
            node.run(result.number, self.command, args, named)
            return result.fetch()

        results: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Meta):
                results.append(RemoteTensor(leaf, node.new()))
            elif leaf is None:
                results.append(None)
            else:
                results.append(operands[leaf])

        numbers = [None if result is None else result.reference.number for result in results]
        node.run(numbers, self.command, args, named)

        return pytree.tree_unflatten(results, self.structure)


_plans: dict[Any, _Plan] = {}


def _plan(func: Any, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> _Plan:
    """Run an operation on meta tensors to find the shapes of its results, and return the plan."""
    _require_remote_targets(func, args, kwargs, operands)
    metas: list[torch.Tensor] = []

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, RemoteTensor):
            return torch.empty((), dtype=tensor.dtype, device="meta")
        # `metas` gets the tensors in the same order as `operands` in `_key`, so their indices are equal.
        metas.append(tensor.meta.tensor())
        return metas[-1]

    unnamed, named = pytree.tree_map_only(torch.Tensor, without_data, (args, dict(kwargs)))
    if "device" in named:
        named["device"] = "meta"
    plan = _Plan(f"torch.ops.{func}")
    try:
        result = func(*unnamed, **named)
    except Exception as error:
        # The shapes depend on values, which only the worker has. Return a plan without them.
        if isinstance(error, NotImplementedError) or _BY_VALUES & set(func.tags):
            return plan
        raise

    leaves, structure = pytree.tree_flatten(result)
    if func._schema.returns and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return plan

    # A factory has an argument `device`. Otherwise take the operand with the most dimensions, because a 0-dim
    # operand may be on the CPU while the others are on a GPU.
    device = str(kwargs.get("device") or max(operands, key=torch.Tensor.dim).meta.device)
    plan.leaves = [None if leaf is None else _leaf(func, leaf, metas, operands, device) for leaf in leaves]
    plan.structure = structure

    return plan


def _require_remote_targets(func: Any, args: Any, kwargs: Mapping[str, Any], operands: Sequence[Any]) -> None:
    """Raise ConfigError if an operation would change a tensor of this process in place."""
    arguments = func._schema.arguments
    values = dict(zip([argument.name for argument in arguments], args, strict=False)) | dict(kwargs)
    targets = [values.get(argument.name) for argument in arguments if argument.is_write]
    for target in pytree.tree_leaves(targets):
        if isinstance(target, torch.Tensor) and not isinstance(target, RemoteTensor):
            raise misplaced(str(func), target, *operands[:1])


def _leaf(func: Any, result: Any, metas: Sequence[Any], operands: Sequence[Any], device: str) -> Meta | int:
    """Return the Meta of a new tensor, or the index of the operand that was changed in place."""
    position = next((number for number, meta in enumerate(metas) if meta is result), None)
    if position is None:
        return Meta.of(result, device)

    before = operands[position].meta
    if Meta.of(result, before.device) != before:
        raise ConfigError(
            f"{func} would change a remote tensor of shape {before.shape} in place to {tuple(result.shape)}.",
            hint="Use the form that returns a new tensor, such as x.reshape() for x.resize_().",
        )

    return position
