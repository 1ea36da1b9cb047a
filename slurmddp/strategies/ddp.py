"""Replicas that average their gradients, with a bucket layout that a resumed run finds again.

torch's DistributedDataParallel packs gradients into buckets, watches the order in which the first backward
pass makes them ready, and repacks them before the second. The order of summation follows that layout, so a
run that resumes at step k reduces its first step in another order than the undisturbed run reduced its step
k: on four gloo ranks the last bits differ (torch 2.13; on two ranks a sum has only one order).
`fix_bucket_layout` lets torch do its repacking at wrap time instead, so that fresh and resumed runs use one
layout from their first real step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.errors import ConfigError

if TYPE_CHECKING:
    from slurmddp.strategies import Standing


class _Touch(nn.Module):
    """Stands in for the model and uses every trainable parameter once, the first registered one first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._uses = tuple(parameters)

    def forward(self) -> torch.Tensor:
        total = self._uses[0].sum() * 0
        for parameter in self._uses[1:]:
            total = total + parameter.sum() * 0
        return total


def fix_bucket_layout(model: DistributedDataParallel) -> None:
    """Run one backward pass of zeros through `model`, visiting its parameters from the last to the first.

    All ranks must call it. Parameters, buffers, gradients (none) and random states stay as they were. Hooks
    of the model and of its parameters do not run, nor do optimizers that step within the backward pass; hooks
    on nodes of autograd's graph do.
    """
    wrapped, broadcasts = model.module, model.broadcast_buffers
    trainable = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    # The stand-in replaces the model rather than its forward method, so that no hook of the model runs.
    model.module = _Touch(trainable)
    model.broadcast_buffers = False
    try:
        with torch.enable_grad(), _without_hooks(trainable):
            model().backward()
            for parameter in trainable:
                parameter.grad = None
            # torch repacks at the start of the next forward pass. One that announced an exchange would make
            # the first real backward pass exchange gradients, wanted or not.
            with model.no_sync():
                model()
    finally:
        model.module, model.broadcast_buffers = wrapped, broadcasts


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Detach the hooks of `parameters`: they may change gradients, or let an optimizer take a step."""
    # torch goes on calling post-accumulate hooks when None takes their place, so an empty dict does (2.13).
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
    """DistributedDataParallel; in a run of one process it leaves the model as it is."""

    def __init__(self, *, find_unused_parameters: bool = False, bucket_mb: float | None = None) -> None:
        self._options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
        if bucket_mb is not None:
            if bucket_mb <= 0:
                raise ConfigError(f"strategy.bucket_mb is {bucket_mb}.", hint="Give a size above 0, or null.")
            self._options["bucket_cap_mb"] = bucket_mb

    def wrap(self, model: nn.Module, place: Standing) -> nn.Module:
        if not distributed.is_initialized():
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"{type(model).__name__} has no parameter that requires a gradient.",
                hint="Call it directly, without setup_model, if it is not meant to be trained.",
            )
        devices = [place.device] if place.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, **self._options)
        if not self._options["find_unused_parameters"]:  # torch never repacks when it looks for unused ones.
            fix_bucket_layout(wrapped)
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return model
