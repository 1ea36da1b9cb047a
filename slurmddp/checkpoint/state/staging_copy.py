"""Copies tensors, one after the other, into memory that other processes can read."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from slurmddp.checkpoint.state.safetensors_stream import is_aligned, is_in_memory

log = logging.getLogger(__name__)

_SMALL_BYTES = 256 << 10
"""What torch does before it copies takes longer than to copy so much, and it would use one thread only."""


class View:
    """This process's view of a memory file: `area`, and the same as a tensor of bytes."""

    def __init__(self, area: mmap.mmap) -> None:
        self.area = area
        with torch.inference_mode(False):  # What is made in it can be written to in it only.
            self.bytes = torch.frombuffer(area, dtype=torch.uint8)
        self.is_pinned: bool | None = None
        """Whether CUDA has taken the memory; None until that is asked."""

    def copy(self, tensors: Sequence[torch.Tensor], at: int) -> None:
        """Copy `tensors` to the place `at` and what follows; devices copy beside each other."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            self._pin()
        _await(devices)  # What is to be copied may come from another stream than the one that copies.
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.nbytes
                self._copy(tensor, at, size)
                at += size
        _await(devices)

    def _copy(self, tensor: torch.Tensor, at: int, size: int) -> None:
        if size <= _SMALL_BYTES and is_in_memory(tensor):
            ctypes.memmove(self.bytes.data_ptr() + at, tensor.data_ptr(), size)
            return
        target = self.bytes[at : at + size]
        if not tensor.is_contiguous() and is_aligned(tensor) and not tensor.is_conj() and not tensor.is_neg():
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
            return
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        # A single element counts as contiguous whatever its stride says; view() would look at the stride.
        target.copy_(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8), non_blocking=tensor.is_cuda)

    def _pin(self) -> None:
        """Register the memory with CUDA, which then copies into it at full speed and beside other work."""
        if self.is_pinned is not None:
            return
        place, size = self.bytes.data_ptr(), len(self.bytes)
        code = torch.cuda.cudart().cudaHostRegister(place, size, 0)  # type: ignore[no-untyped-call]
        self.is_pinned = int(code) == 0
        if not self.is_pinned:
            log.warning(
                "CUDA does not take the memory for checkpoints (error %d): copies are slower.", int(code)
            )
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")  # CUDA keeps the error, and the next kernel is blamed for it.

    def close(self) -> None:
        """Let go of the memory; the view is of no use after that."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        del self.bytes  # It would go on pointing there.
        self.area.close()


def _await(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
