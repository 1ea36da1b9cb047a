"""One value as bytes that hold no pickle: the tree as JSON, then its tensors in the safetensors format.

Ranks send each other such bytes. Other processes may send bytes in a rank's place, and a pickle could run
their code.
"""

from __future__ import annotations

import json
from typing import Any

from slurmddp.checkpoint.state.safetensors_stream import decode, encode
from slurmddp.checkpoint.state.state_tree import flatten, unflatten
from slurmddp.errors import CheckpointError

_LENGTH_BYTES = 8


def pack(value: Any) -> bytes:
    """Return the bytes of a value; raises CheckpointError for what a checkpoint could not store either."""
    flat = flatten({"": value})
    tree = json.dumps(flat.tree, separators=(",", ":")).encode()
    tensors = encode(flat.tensors) if flat.tensors else ()
    return b"".join([len(tree).to_bytes(_LENGTH_BYTES, "big"), tree, *tensors])


def unpack(packed: bytes) -> Any:
    """Return the value again, its tensors on the CPU; raises CheckpointError for other bytes."""
    view = memoryview(packed)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "big")
    try:
        tree = json.loads(bytes(view[_LENGTH_BYTES:end]))
        tensors = decode(Bytes(view[end:]), len(view) - end) if end < len(view) else {}
        return unflatten(tree, tensors)[""]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"The bytes hold no value: {error}.") from error


class Bytes:
    """Bytes as a source of tensors."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readinto(self, buffer: memoryview) -> None:
        end = self._at + len(buffer)
        if end > len(self._view):
            raise CheckpointError("The bytes of the tensors end too early.")
        buffer[:] = self._view[self._at : end]
        self._at = end
