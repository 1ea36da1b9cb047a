"""Encode tensors into the safetensors format and decode them, chunk by chunk.

The format (https://github.com/huggingface/safetensors): the header's length in 8 little-endian bytes, a JSON
header padded with spaces, the bytes of the tensors. The library's functions are not used, because they can't
hash the bytes during the transfer and need a second copy of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from slurmddp.checkpoint.files.digest import HashedReader
from slurmddp.checkpoint.memory.shared_buffer import PAGE_BYTES
from slurmddp.errors import CheckpointError

MAX_HEADER_BYTES = 1 << 30
_LENGTH_BYTES = 8

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class Bytes:
    """Reader of bytes in memory, for `decode`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readinto(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes.

        Raises:
            CheckpointError: fewer bytes are left than `buffer` takes.
        """
        end = self._at + len(buffer)
        if end > len(self._view):
            raise CheckpointError("The tensor file in memory ends too early.")

        buffer[:] = self._view[self._at : end]
        self._at = end


Source = HashedReader | Bytes


def encode(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file with `tensors`: first the header, then each tensor.

    Tensors of GPUs are copied to the CPU one at a time.
    """
    head, ordered = layout(tensors)
    yield memoryview(head)
    for tensor in ordered:
        if tensor.numel():
            yield _bytes_of(tensor)


def encoded_size(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the size in bytes of the safetensors file that `encode` yields."""
    head, ordered = layout(tensors)
    return len(head) + sum(tensor.nbytes for tensor in ordered)


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the length and header of a safetensors file as bytes, and the tensors in the file's order."""
    # The types with the largest elements come first, so that every tensor starts at a multiple of its
    # element size.
    ordered = sorted(tensors.items(), key=lambda item: -_stored_width(item[1].dtype))
    return _head(ordered), [tensor for _, tensor in ordered]


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether `encode` yields the memory of a tensor itself instead of a copy."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether `layout` places a tensor of this dtype at a multiple of its element size."""
    return tensor.dtype in _DTYPES


def _head(ordered: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Return the first bytes of the file: the length of the header, and the header padded to a whole page."""
    header: dict[str, Any] = {}
    offset = 0
    odd = {name: _odd_entry(tensor) for name, tensor in ordered if tensor.dtype not in _DTYPES}
    if odd:
        header["__metadata__"] = {"slurmddp_dtypes": json.dumps(odd)}

    for name, tensor in ordered:
        size = tensor.nbytes
        header[name] = {
            "dtype": _DTYPES.get(tensor.dtype, "U8"),
            "shape": [size] if name in odd else list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size

    text = json.dumps(header, separators=(",", ":")).encode()
    # Direct writes need the same alignment in the file and in memory, so pad the header to a whole page.
    text += b" " * (-(_LENGTH_BYTES + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def decode(source: Source, size: int) -> dict[str, torch.Tensor]:
    """Read a safetensors file of `size` bytes into new CPU tensors, and return them by name.

    Raises:
        CheckpointError: sizes in the file contradict each other, or the file ends too early.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: the header is damaged.
    """
    entries, odd = _read_header(source, size)

    tensors = {}
    for name, entry in entries.items():
        tensors[name] = _empty(entry, odd.get(name))
        if tensors[name].numel():
            source.readinto(_bytes_of(tensors[name]))
    return tensors


def _read_header(source: Source, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the header of a safetensors file of `size` bytes.

    Returns:
        Two dicts by tensor name: the entry of each tensor, and for each tensor that is stored as bytes its
        real dtype and shape (`_odd_entry`).
    """
    length = bytearray(_LENGTH_BYTES)
    source.readinto(memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise CheckpointError(
            f"The header of the tensor file should have {header_bytes} bytes, but the file has only {size}."
        )

    text = bytearray(header_bytes)
    source.readinto(memoryview(text))
    entries = json.loads(text)
    odd = json.loads(entries.pop("__metadata__", {}).get("slurmddp_dtypes", "{}"))

    end = 0
    for entry in entries.values():
        start, stop = entry["data_offsets"]
        # `encode` writes the tensors in the order of the header and without gaps.
        if start != end:
            raise CheckpointError("The tensor file is damaged: its header does not list adjoining tensors.")
        end = stop
    if _LENGTH_BYTES + header_bytes + end != size:
        raise CheckpointError(f"The tensor file has {size} bytes, but its header describes another size.")
    return entries, odd


def _empty(entry: dict[str, Any], odd: dict[str, Any] | None) -> torch.Tensor:
    """Return an uninitialized CPU tensor with dtype and shape of `odd`, or of `entry` if `odd` is None."""
    if odd:
        dtype = getattr(torch, odd["dtype"])
        shape = odd["shape"]
    else:
        dtype = _DTYPES_BY_NAME[entry["dtype"]]
        shape = entry["shape"]
    tensor = torch.empty(shape, dtype=dtype, device="cpu")

    start, stop = entry["data_offsets"]
    if tensor.nbytes != stop - start:
        raise CheckpointError("The tensor file is damaged: a tensor's shape does not fit its size in bytes.")
    return tensor


def _odd_entry(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the dtype and shape of a tensor that is stored as bytes (U8).

    Older versions of safetensors lack its dtype.
    """
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _stored_width(dtype: torch.dtype) -> int:
    return dtype.itemsize if dtype in _DTYPES else 1


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8, shape (nbytes,): a view if it is contiguous, else a copy."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, but view() requires the stride 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return byte_view(tensor.detach().cpu()).numpy().data
