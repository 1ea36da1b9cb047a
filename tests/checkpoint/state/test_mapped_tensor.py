"""Memory that CUDA refuses to register; `test_staging.py` copies tensors of all layouts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state.mapped_tensor import MappedTensor


def test_memory_that_cuda_refuses_is_registered_once_and_the_error_is_cleared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        """Keeps its error for the next kernel, as CUDA does."""

        offered = 0
        error = 0

        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            self.offered += 1
            self.error = 2
            return self.error

        def launch(self, *_: Any, **__: Any) -> None:
            error, self.error = self.error, 0
            if error:
                raise RuntimeError("CUDA error: out of memory")

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    descriptor = shared_buffer.create()
    view = MappedTensor(shared_buffer.reserve(descriptor, shared_buffer.PAGE_BYTES))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", runtime.launch)
        view._pin()
        view._pin()
    assert (runtime.offered, runtime.error, view.is_pinned) == (1, 0, False)
    assert caplog.text.count("CUDA can't register the memory for checkpoint copies (error 2)") == 1
    view.close()
    os.close(descriptor)
