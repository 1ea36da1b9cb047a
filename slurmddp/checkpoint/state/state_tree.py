"""Convert a nested training state to JSON plus named tensors and back, without pickle.

JSON has no tuples and only string keys, so tags mark other values: `{"dict": [[key, value], ...]}` keeps the
types of keys, `{"tuple": [...]}` distinguishes tuples from lists, `{"tensor": name}` names a tensor. `null`,
booleans, numbers, strings and lists need no tag.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slurmddp.checkpoint.files.manifest import FORMAT
from slurmddp.checkpoint.state.shards import entry_of, local
from slurmddp.errors import CheckpointError
from slurmddp.host.free_name import first_free

MAX_DEPTH = 100
"""The largest number of nested containers. A deeper state is refused: a container may contain itself."""

_JSON_INT_BITS = 63
_TOP = "the top"
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAPPING_TYPES = {tag: kind for kind, tag in _MAPPINGS.items()}


@dataclass
class FlatState:
    """A state in two parts: `tree`, its structure and plain values as JSON values, and `tensors` by name.

    A tensor that occurs several times in the state is only once in `tensors`.
    """

    tree: Any
    tensors: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's rows of the sharded tensors, which are not in `tensors`."""
    table: dict[str, Any] = field(default_factory=dict)
    """The entry of each sharded tensor in the tree file, see `shards.entry_of`."""

    def to_json(self) -> bytes:
        """Return the content of the tree file."""
        content = {"format": FORMAT, "state": self.tree}
        if self.table:
            content["shards"] = self.table
        return json.dumps(content, separators=(",", ":")).encode()


def flatten(state: Mapping[str, Any], *, sharded: bool = False) -> FlatState:
    """Split a state into JSON values and named tensors.

    Args:
        state: as in `checkpoint.write`.
        sharded: whether DTensors are allowed. Each rank gets its own rows, and all ranks get the same tree.

    Raises:
        CheckpointError: a value can't be stored; the message names its key path.
    """
    flattener = _Flattener(sharded)
    tree = flattener.value(dict(state), "", 0)
    shards = {name: flattener.tensors.pop(name) for name in flattener.table}
    return FlatState(tree, flattener.tensors, shards, flattener.table)


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild a state from a tree and its tensors, the reverse of `flatten`.

    Raises:
        CheckpointError: the tree contains an unknown tag.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree

    tag = next(iter(tree), "")
    if tag in _MAPPING_TYPES:
        return _mapping(tag, tree, tensors)
    if tag == "tuple":
        return tuple(unflatten(item, tensors) for item in tree[tag])
    if tag == "tensor":
        return tensors[tree[tag]]
    if tag == "int":
        return int(tree[tag], 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(tree[tag]))[0]

    raise CheckpointError(
        f"The checkpoint contains a value of the unknown type {tag!r}.",
        hint="A newer version of slurmddp wrote it. Load it with that version.",
    )


def _mapping(tag: str, tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    built = _MAPPING_TYPES[tag]()
    for key, value in tree[tag]:
        built[key] = unflatten(value, tensors)
    if "metadata" in tree:
        built._metadata = unflatten(tree["metadata"], tensors)
    return built


class _Flattener:
    def __init__(self, sharded: bool = False) -> None:
        self._sharded = sharded
        self.tensors: dict[str, torch.Tensor] = {}
        self.table: dict[str, Any] = {}
        self._names: dict[int, list[tuple[torch.Tensor, str]]] = {}

    def value(self, value: Any, path: str, depth: int) -> Any:
        """Convert a value of the state to JSON values, and collect its tensors.

        Args:
            value: the value.
            path: its key path in the state, such as "model/weight"; empty for the state itself.
            depth: the number of containers around it.

        Raises:
            CheckpointError: the value can't be stored.
        """
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            fits = value.bit_length() <= _JSON_INT_BITS
            return value if fits else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if depth >= MAX_DEPTH:
            begin = "/".join(path.split("/")[:6])
            raise CheckpointError(
                f"The state is nested deeper than {MAX_DEPTH} levels at {begin}...",
                hint="Check whether a container contains itself, which can't be stored.",
            )

        if kind in _MAPPINGS:
            return self._pairs(value, path, depth)
        if kind in (list, tuple):
            items = [self.value(item, _in(path, index), depth + 1) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        raise _unsupported(value, path)

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"The state has the key {key!r} ({type(key).__name__}) at {path or _TOP}.",
                    hint="Use strings or integers as keys.",
                )
        tree: dict[str, Any] = {
            _MAPPINGS[type(value)]: [
                [key, self.value(item, _in(path, key), depth + 1)] for key, item in value.items()
            ]
        }
        # This attribute of a module's state_dict has the versions of its modules. load_state_dict reads it.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            tree["metadata"] = self.value(metadata, _in(path, "_metadata"), depth + 1)
        return tree

    def _tensor(self, tensor: torch.Tensor, path: str) -> str:
        """Add a tensor, or this rank's rows of a DTensor, to `tensors`, and return its name there."""
        entry = entry_of(tensor) if self._sharded else None
        if entry is None:
            return self._whole_tensor(tensor, path)

        name = self._whole_tensor(local(tensor.detach()), path)
        self.table[name] = entry
        return name

    def _whole_tensor(self, tensor: torch.Tensor, path: str) -> str:
        _check_plain(tensor, path)
        # Tied tensors have the same address and are stored once. Skip empty tensors, which may have the same
        # address by chance.
        same_address: list[tuple[torch.Tensor, str]] = []
        if tensor.numel():
            same_address = self._names.setdefault(tensor.data_ptr(), [])
        for other, name in same_address:
            if _is_same(tensor, other):
                return name

        name = _free_name(path or _TOP, self.tensors)
        same_address.append((tensor, name))
        self.tensors[name] = tensor.detach() if tensor.requires_grad else tensor
        return name


def _in(path: str, key: str | int) -> str:
    return f"{path}/{key}" if path else str(key)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with the same address have the same elements in the same order."""
    facts = [(t.device, t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in (tensor, other)]
    return facts[0] == facts[1]


def _check_plain(tensor: torch.Tensor, path: str) -> None:
    """Raise CheckpointError if `tensor` is of a subclass, sparse, quantised, nested, on meta, or freed."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"a sparse, quantised or nested tensor ({tensor.layout}, {tensor.dtype})"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, which has no values"
    elif tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        # Refuse it, because reading its values would crash the process.
        kind = "a tensor whose storage was freed"
    else:
        return

    raise CheckpointError(
        f"The value at {path or _TOP} is {kind}, which can't be stored or sent.",
        hint="Give an ordinary dense tensor in its place.",
    )


def _unsupported(value: Any, path: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"The value at {path or _TOP} is a {kind.__module__}.{kind.__qualname__}, "
        "which can't be stored or sent.",
        hint="Give tensors, int, float, str, bool, None, and dict, list or tuple of them; "
        "convert NumPy values with float(), int() or torch.from_numpy().",
    )


def _free_name(name: str, taken: Mapping[str, torch.Tensor]) -> str:
    # Avoid "__metadata__", a name that the safetensors format reserves.
    return first_free(f"{name}~", lambda name: name in taken or name == "__metadata__", plain=name)
