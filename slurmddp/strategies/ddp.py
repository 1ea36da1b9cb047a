"""Data parallelism with the same bucket layout in fresh and resumed runs.

torch's DistributedDataParallel packs gradients into buckets. It repacks them before the second backward pass,
in the order in which the first pass finished them. The layout decides the order of summation. So the first
step of a resumed run would differ in the last bits on four gloo ranks (torch 2.13; a sum of two ranks has one
order). `fix_bucket_layout` makes torch repack before the first step, in fresh and in resumed runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.errors import ConfigError


class _Touch(nn.Module):
    """A module that uses each trainable parameter once, in the order of registration."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._uses = tuple(parameters)

    def forward(self) -> torch.Tensor:
        total = self._uses[0].sum() * 0
        for parameter in self._uses[1:]:
            total = total + parameter.sum() * 0
        return total


def fix_bucket_layout(model: DistributedDataParallel) -> None:
    """Run one backward pass of zeros through `model`, from its last parameter to its first.

    All ranks must call it. Parameters, buffers and random states stay unchanged, and gradients stay None.
    Hooks of the model and its parameters do not run, nor do optimizers in the backward pass. Hooks on nodes
    of autograd's graph do run.
    """
    wrapped, broadcasts = model.module, model.broadcast_buffers
    trainable = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    # _Touch replaces the model, not only its forward method, so that no hook of the model runs.
    model.module = _Touch(trainable)
    model.broadcast_buffers = False
    try:
        with torch.enable_grad(), _without_hooks(trainable):
            model().backward()
            for parameter in trainable:
                parameter.grad = None
            # torch repacks at the start of the next forward pass. Without no_sync, the first backward pass of
            # the training would average gradients even within an accumulated step.
            with model.no_sync():
                model()
    finally:
        model.module, model.broadcast_buffers = wrapped, broadcasts


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Detach the hooks of `parameters`, which may change gradients or step an optimizer."""
    # An empty dict, because torch calls post-accumulate hooks even after they are set to None (2.13).
    empty: dict[str, Any] = {
        "_backward_hooks": {},
        "_post_accumulate_grad_hooks": {},
        "_in_backward_optimizers": [],
    }
    detached = [
        (parameter, name, found)
        for parameter in parameters
        for name in empty
        if (found := getattr(parameter, name, None)) is not None
    ]
    for parameter, name, _ in detached:
        setattr(parameter, name, empty[name])
    try:
        yield
    finally:
        for parameter, name, found in detached:
            setattr(parameter, name, found)


class DataParallel:
    """DistributedDataParallel; one process without a process group uses the bare model.

    Args:
        find_unused_parameters: whether some parameters get no gradient in some steps.
        bucket_mb: size of a bucket in MB; None: torch's default.

    Raises:
        ConfigError: `bucket_mb` is not above 0.
    """

    def __init__(self, *, find_unused_parameters: bool = False, bucket_mb: float | None = None) -> None:
        self._options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
        if bucket_mb is not None:
            if bucket_mb <= 0:
                raise ConfigError(f"strategy.bucket_mb is {bucket_mb}.", hint="Give a size above 0, or null.")
            self._options["bucket_cap_mb"] = bucket_mb

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if not distributed.is_initialized():
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"{type(model).__name__} has no parameter that requires a gradient.",
                hint="Call it directly, without setup_model, if it is not meant to be trained.",
            )
        devices = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, **self._options)
        # torch never repacks when it searches unused parameters.
        if not self._options["find_unused_parameters"]:
            fix_bucket_layout(wrapped)
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model
