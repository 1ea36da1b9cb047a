"""A memory file that is mapped as a tensor: copies tensors of CPUs and GPUs into it."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from slurmddp.checkpoint.state.safetensors_stream import byte_view, is_aligned, is_in_memory

log = logging.getLogger(__name__)

_SMALL_BYTES = 256 << 10
"""Up to this size a memmove is faster than torch's copy, which has more overhead and uses one thread here."""


class MappedTensor:
    """A memory file mapped into this process: `area`, and the same bytes as a uint8 tensor."""

    def __init__(self, area: mmap.mmap) -> None:
        self.area = area
        with torch.inference_mode(False):  # Else only inference mode could write to the tensor.
            self.bytes = torch.frombuffer(area, dtype=torch.uint8)
        self.is_pinned: bool | None = None
        """Whether the memory is registered with CUDA; None before the first copy from a GPU."""

    def copy(self, tensors: Sequence[torch.Tensor], at: int) -> None:
        """Copy `tensors` one behind the other, from byte `at` on; devices copy in parallel."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            self._pin()
        _synchronize(devices)  # Another stream may still compute the tensors.
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.nbytes
                self._copy(tensor, at, size)
                at += size
        _synchronize(devices)

    def _copy(self, tensor: torch.Tensor, at: int, size: int) -> None:
        if size <= _SMALL_BYTES and is_in_memory(tensor):
            ctypes.memmove(self.bytes.data_ptr() + at, tensor.data_ptr(), size)
            return
        target = self.bytes[at : at + size]
        if not tensor.is_contiguous() and is_aligned(tensor) and not tensor.is_neg():
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
            return
        target.copy_(byte_view(tensor), non_blocking=tensor.is_cuda)

    def _pin(self) -> None:
        """Register the memory with CUDA, so that copies are fast and asynchronous."""
        if self.is_pinned is not None:
            return
        address, size = self.bytes.data_ptr(), len(self.bytes)
        code = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        self.is_pinned = int(code) == 0
        if not self.is_pinned:
            log.warning(
                "CUDA can't register the memory for checkpoints (error %d): copies are slower.", int(code)
            )
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")  # Clears the error, which the next kernel would raise.

    def close(self) -> None:
        """Unmap the memory; later calls fail."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        del self.bytes  # Its address is about to become invalid.
        self.area.close()


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
