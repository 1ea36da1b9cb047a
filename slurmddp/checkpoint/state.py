"""Turns a nested training state into JSON plus named tensors and back, so that nothing is ever pickled.

The JSON side is tagged wherever plain JSON would forget something: `{"dict": [[key, value], ...]}` keeps
the types of keys, `{"tuple": [...]}` tells tuples from lists, `{"tensor": name}` points to a tensor.
Plain `null`, booleans, numbers, strings and lists stand for themselves.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slurmddp.errors import CheckpointError

MAX_DEPTH = 100
"""Deeper nesting is taken for a container that holds itself."""

_JSON_INT_BITS = 63
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAPPING_TYPES = {tag: kind for kind, tag in _MAPPINGS.items()}


@dataclass
class FlatState:
    """A state taken apart: `tree` is JSON, `tensors` holds each distinct tensor once."""

    tree: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Take `state` apart; raises CheckpointError naming the key path of anything that can't be stored."""
    return _Flattener().run(state)


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a state together again; tensors that were tied come back as one tensor."""
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
        f"The checkpoint holds a value of the unknown kind {tag!r}.",
        hint="It was written by a newer slurmddp; load it with that version.",
    )


def _mapping(tag: str, tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    built = _MAPPING_TYPES[tag]()
    for key, value in tree[tag]:
        built[key] = unflatten(value, tensors)
    if "metadata" in tree:
        built._metadata = unflatten(tree["metadata"], tensors)
    return built


class _Flattener:
    def __init__(self) -> None:
        self._flat = FlatState()
        self._names: dict[tuple[Any, ...], str] = {}

    def run(self, state: Mapping[str, Any]) -> FlatState:
        self._flat.tree = self._value(dict(state), ())
        return self._flat

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= _JSON_INT_BITS else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        return self._container(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if len(path) >= MAX_DEPTH:
            raise CheckpointError(
                f"The state is nested deeper than {MAX_DEPTH} levels at {_join(path[:6])}...",
                hint="A container that holds itself can't be stored.",
            )
        if kind in _MAPPINGS:
            return self._pairs(value, path)
        if kind in (list, tuple):
            items = [self._value(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        raise _unsupported(value, path)

    def _pairs(self, value: dict[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"The state has the key {key!r} ({type(key).__name__}) at {_join(path)}.",
                    hint="Keys may be strings and integers.",
                )
        tree: dict[str, Any] = {
            _MAPPINGS[type(value)]: [[key, self._value(item, (*path, key))] for key, item in value.items()]
        }
        # A module's state_dict carries the versions of its modules here; load_state_dict reads them.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            tree["metadata"] = self._value(metadata, (*path, "_metadata"))
        return tree

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        _check_plain(tensor, path)
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(),
                    tensor.is_conj(), tensor.is_neg())  # fmt: skip
        known = self._names.get(identity) if tensor.numel() else None
        if known is not None:
            return known
        name = _free_name(_join(path), self._flat.tensors)
        self._names[identity] = name
        self._flat.tensors[name] = tensor.detach()
        return name


def _check_plain(tensor: torch.Tensor, path: tuple[Any, ...]) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        found = f"a sparse, quantised or nested tensor ({tensor.layout}, {tensor.dtype})"
    elif tensor.is_meta:
        found = "a tensor on the meta device, which has no values"
    else:
        return
    raise CheckpointError(
        f"The state holds {found} at {_join(path)}.", hint="Store an ordinary dense tensor in its place."
    )


def _unsupported(value: Any, path: tuple[Any, ...]) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"The state holds a {kind.__module__}.{kind.__qualname__} at {_join(path)}.",
        hint="Store tensors, int, float, str, bool, None, and dict, list or tuple of them; "
        "convert NumPy values with float(), int() or torch.from_numpy().",
    )


def _join(path: Iterable[Any]) -> str:
    return "/".join(str(part) for part in path) or "the top"


def _free_name(name: str, taken: Mapping[str, torch.Tensor]) -> str:
    candidate, number = name, 1
    # "__metadata__" is the one name that the safetensors format keeps for itself.
    while candidate in taken or candidate == "__metadata__":
        number += 1
        candidate = f"{name}~{number}"
    return candidate
