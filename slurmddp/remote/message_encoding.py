"""Encode commands and replies as JSON, with tags for tensors, dtypes, devices and complex numbers.

A value of another type is refused. Because nothing is pickled, a message can only name objects that its
receiver knows: operations of torch, importable functions, and tensors by their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from slurmddp.errors import ConfigError

BYE = "bye"
"""The command by which the controller ends the connection."""
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda name: getattr(torch, name),
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
    "dict": dict,
    "scalar": lambda facts: torch.tensor(facts[0], dtype=facts[1]),
}
"""By tag, the function that returns a value from the content of the tag."""


class MessageEncoding:
    """Encoder and decoder of the messages at one end of a connection.

    Args:
        describe: returns a dict with a tag and its content for a tensor or another object of this end; None
            for objects that can't be sent.
        find: by tag, the functions that return the object for a content that the other end has described.
    """

    def __init__(self, describe: Callable[[Any], Any], **find: Callable[[Any], Any]) -> None:
        self._describe = describe
        self._makers = {**_MAKERS, **find}
        self.encode = json.JSONEncoder(default=self._tagged, separators=(",", ":")).encode
        self.decode = json.JSONDecoder(object_hook=self._untagged).decode

    def _tagged(self, value: Any) -> Any:
        """Return a dict with a tag and its content for a value of a type that JSON lacks.

        Raises:
            ConfigError: values of this type can't be sent.
        """
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}

        description = self._describe(value)
        if description is None:
            raise ConfigError(
                f"A value of type {type(value).__name__} can't go to a worker or back: {value!r:.80}.",
                hint="Send tensors, numbers, strings, lists and dicts. Create other objects on the worker by "
                "remote.call().",
            )

        return description

    def _untagged(self, tagged: dict[str, Any]) -> Any:
        ((tag, content),) = tagged.items()
        return self._makers[tag](content)


def without_dicts(value: Any) -> Any:
    """Return `value` with each dict replaced by a tag and a list of its items, and each tuple by a list."""
    if isinstance(value, dict):
        return {"dict": [[key, without_dicts(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [without_dicts(item) for item in value]
    return value


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension: a view of a contiguous tensor, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Don't use `reshape`, which would keep the stride 0 of a single element.
    return dense.as_strided((dense.numel(),), (1,))


def to_bytes(tensor: torch.Tensor) -> tuple[list[Any], memoryview]:
    """Return a tensor as data for `from_bytes`: its dtype, shape and strides, and its bytes.

    The strides are those that torch gives to a copy of the tensor. If a CPU tensor has these strides already,
    the bytes share its memory.
    """
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    strides = torch.empty_like(dense, device="meta").stride()
    if dense.stride() != strides:
        dense = dense.clone()
    memory: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return [dense.dtype, list(dense.shape), list(strides)], memoryview(memory)


def from_bytes(facts: list[Any], data: memoryview) -> torch.Tensor:
    """Return the tensor of a result of `to_bytes`; it shares the memory of `data`."""
    dtype, shape, strides = facts
    # Disable `with remote.node` during the call: the new tensor would be created on a worker.
    with _disable_current_modes():
        return torch.from_numpy(numpy.asarray(data)).view(dtype).as_strided(shape, strides)
