"""Compile a model in place by torch.compile, and run it uncompiled outside of training steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from slurmddp.errors import ConfigError


def compile_in_place(model: nn.Module, device: torch.device) -> None:
    """Compile `model` by torch.compile at its first call, which then takes up to minutes.

    The module stays the same object, so the names of parameters and buffers don't change.

    Args:
        model: a result of `setup_model`.
        device: the device of its inputs.

    Raises:
        ConfigError: the host has no compiler for the device.
    """
    problem = _missing(device)
    if problem:
        raise ConfigError(
            f"train.compile is true, but {problem}.",
            hint="Install it on the nodes (or load its module in cluster.setup), or set train.compile=false.",
        )
    model.compile()


def uncompiled(compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled models run eagerly; without effect if `compiled` is false.

    It is for evaluation and text generation, whose batches have other shapes than in training: torch would
    compile the model again for each shape.
    """
    # torch before 2.6 has no `set_stance`. It compiles the model for each shape.
    if not compiled or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()

    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _missing(device: torch.device) -> str:
    """Return why models can't be compiled for `device`, as a text; empty if they can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "torch finds no Triton for this GPU"

    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "torch finds no C++ compiler (CXX, g++ or clang++)"

    return ""
