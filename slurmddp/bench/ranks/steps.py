"""The model, data and step that all contestants of a benchmark share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from slurmddp.bench.ranks.timing import seconds
from slurmddp.bench.settings import Settings

_BATCHES = 4
"""The number of different batches, which the steps use in turn."""
_LEARNING_RATE = 0.05
_MOMENTUM = 0.9


def build_model(settings: Settings, device: torch.device) -> nn.Module:
    """Build a multilayer perceptron; equal settings give equal initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        layers: list[nn.Module] = []
        for _ in range(settings.layers):
            layers += [nn.Linear(settings.width, settings.width), nn.Tanh()]

        return nn.Sequential(*layers, nn.Linear(settings.width, 1)).to(device)


def wrap_ddp(
    model: nn.Module, device: torch.device, group: distributed.ProcessGroup | None = None
) -> nn.Module:
    """Wrap a model in torch's DistributedDataParallel over the ranks of a group; None: all ranks."""
    devices = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=group)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return SGD with momentum for a model, with the same learning rate for every compared strategy."""
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)


def build_batches(settings: Settings, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `_BATCHES` batches (inputs, targets) of `batch` random samples, the same on all ranks."""
    generator = torch.Generator().manual_seed(settings.seed)
    return [
        (
            torch.randn(batch, settings.width, generator=generator),
            torch.randn(batch, 1, generator=generator),
        )
        for _ in range(_BATCHES)
    ]


@dataclass
class StepTimes:
    """Seconds of each step on this rank, split into data, forward and backward pass, and optimizer."""

    data: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    """Seconds of forward and backward pass, including their communication."""
    optimizer: list[float] = field(default_factory=list)

    @property
    def whole(self) -> list[float]:
        """Seconds of each step: the sum of data, gradients and optimizer."""
        return [sum(parts) for parts in zip(self.data, self.gradients, self.optimizer, strict=True)]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    share: slice,
    steps: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> StepTimes:
    """Train on this rank's slice of each batch, and return the seconds of each step.

    Args:
        model: the module to call in training.
        optimizer: the optimizer of the model.
        batches: the batches, each with the samples of all ranks; used in turn.
        share: the slice of each batch that this rank trains on.
        steps: number of steps.
        device: the device of the model.
        before: called before each step, outside of the measured time.
    """
    times = StepTimes()
    stream = itertools.cycle(batches)
    batch: list[torch.Tensor] = []

    def fetch() -> None:
        batch[:] = [tensor[share].to(device, copy=True) for tensor in next(stream)]

    def gradients() -> None:
        optimizer.zero_grad()
        inputs, targets = batch
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    for _ in range(steps):
        before()
        times.data.append(seconds(fetch, device))
        times.gradients.append(seconds(gradients, device))
        times.optimizer.append(seconds(optimizer.step, device))

    return times


def reset_peak(device: torch.device) -> None:
    """Lower the peak that `peak_memory` returns to the memory in use at this moment."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return

    # Writing 5 resets the peak resident set size of this process, see proc(5). If the kernel refuses, the
    # benchmark goes on, and `peak_memory` includes the memory of earlier trainings.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
