"""Map a memory file as a tensor, and copy tensors from CPUs and GPUs into it."""

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
"""Up to this size memmove is faster than torch's copy, which has more overhead and no more threads."""


class MappedTensor:
    """A memory file that is mapped into this process: as the map `area`, and as the uint8 tensor `bytes`."""

    def __init__(self, area: mmap.mmap) -> None:
        self.area = area
        # Leave inference mode: a tensor that is created in it can't be written outside it.
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(area, dtype=torch.uint8)
        self.is_pinned: bool | None = None
        """Whether the memory is registered with CUDA; None before the first copy from a GPU."""

    def copy(self, tensors: Sequence[torch.Tensor], at: int) -> None:
        """Copy the bytes of `tensors` into the memory, one after the other, from byte `at` on.

        It returns when all copies are complete. Copies from several GPUs run in parallel.
        """
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            self._pin()

        # Wait first: another stream may still be computing the tensors.
        _synchronize(devices)
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.nbytes
                self._copy(tensor, at, size)
                at += size
        # Copies from a GPU are asynchronous, so wait for them.
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
        """Register the memory with CUDA, so that copies are fast and asynchronous.

        Only the first call does so. If CUDA refuses, a warning is logged, and copies are slower.
        """
        if self.is_pinned is not None:
            return

        address = self.bytes.data_ptr()
        code = torch.cuda.cudart().cudaHostRegister(address, len(self.bytes), 0)  # type: ignore[no-untyped-call]
        self.is_pinned = int(code) == 0
        if self.is_pinned:
            return

        log.warning(
            "CUDA can't register the memory for checkpoint copies (error %d), so they are slower.", int(code)
        )
        # CUDA raises this error a second time, at the next kernel. A small kernel is started to take it, so
        # that no kernel of the training fails.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")

    def close(self) -> None:
        """Unmap the memory. The object can't be used any more."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        # Delete the tensor before the map is closed, because the tensor's address then becomes invalid.
        del self.bytes
        self.area.close()


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
