"""Packs a value into bytes for other ranks: its tree as JSON, then its tensors in the safetensors format.

The bytes hold no pickle, because a pickle from a foreign process could run its code.
"""

from __future__ import annotations

import json
from typing import Any

from slurmddp.checkpoint.state.safetensors_stream import Bytes, decode, encode
from slurmddp.checkpoint.state.state_tree import flatten, unflatten
from slurmddp.errors import CheckpointError

_LENGTH_BYTES = 8


def pack(value: Any) -> bytes:
    """Return the bytes of a value; raises CheckpointError for values that a checkpoint can't store."""
    flat = flatten({"": value})
    tree = json.dumps(flat.tree, separators=(",", ":")).encode()
    tensors = encode(flat.tensors) if flat.tensors else ()
    return b"".join([len(tree).to_bytes(_LENGTH_BYTES, "big"), tree, *tensors])


def unpack(packed: bytes) -> Any:
    """Return the value, with its tensors on the CPU; raises CheckpointError for damaged bytes."""
    view = memoryview(packed)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "big")
    try:
        tree = json.loads(bytes(view[_LENGTH_BYTES:end]))
        tensors = decode(Bytes(view[end:]), len(view) - end) if end < len(view) else {}
        return unflatten(tree, tensors)[""]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"The bytes hold no value: {error}.") from error
