"""Train one model under every strategy and under torch's own wrappers: equal weights first, then times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from slurmddp import strategies
from slurmddp.bench.ranks import steps
from slurmddp.bench.ranks.timing import of_slowest_rank, spread
from slurmddp.bench.settings import Settings
from slurmddp.errors import SlurmddpError
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.utilization import peak_memory

TOLERANCE = 1e-4
"""Largest difference of a final weight from the training in one process; rounding stays far below."""

Built = tuple[nn.Module, Optimizer, Callable[[], object]]
"""The model to call, the optimizer to step, and a function to call after the last step."""
Contestant = Callable[[nn.Module, torch.device], Built]


def _nothing() -> None:
    """Do nothing after the last step."""


def _torch_ddp(model: nn.Module, device: torch.device) -> Built:
    wrapped = steps.wrap_ddp(model, device)
    return wrapped, steps.build_optimizer(wrapped), _nothing


def _torch_fsdp(model: nn.Module, device: torch.device) -> Built:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, steps.build_optimizer(model), _nothing


def _data_parallel(model: nn.Module, device: torch.device) -> Built:
    wrapped = nn.DataParallel(model)
    return wrapped, steps.build_optimizer(wrapped), _nothing


def _single(model: nn.Module, device: torch.device) -> Built:
    return model, steps.build_optimizer(model), _nothing


def _strategy(name: str) -> Contestant:
    def build(model: nn.Module, device: torch.device) -> Built:
        strategy = strategies.build(name)
        wrapped = strategy.wrap(model, device)
        optimizer = steps.build_optimizer(wrapped)
        setup = getattr(strategy, "setup_optimizer", None)
        optimizer = setup(optimizer, wrapped) if setup else optimizer
        return wrapped, optimizer, getattr(strategy, "close", _nothing)

    return build


ALONE: Mapping[str, Contestant] = {"single": _single, "data_parallel": _data_parallel}
"""Contestants of one process: rank 0 trains on the whole batch, and the other ranks wait."""


def contestants() -> dict[str, Contestant]:
    """Return every shipped strategy and torch's wrappers, by name."""
    shipped = {name: _strategy(name) for name in strategies.STRATEGIES if name not in ALONE}
    return {**ALONE, "torch DDP": _torch_ddp, "torch FSDP": _torch_fsdp, **shipped}


def measure_strategies(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Return the table `strategies`."""
    expected = _reference(settings, d.device)
    rows = [_row(d, settings, name, build, expected) for name, build in contestants().items()]
    return {"strategies": rows}


def _reference(settings: Settings, device: torch.device) -> torch.Tensor:
    """Return the weights that one process ends with."""
    model, whole = steps.build_model(settings, device), slice(0, settings.batch)
    batches = steps.build_batches(settings, settings.batch)
    count = settings.warmup + settings.repetitions
    steps.train(model, steps.build_optimizer(model), batches, whole, count, device)
    return _weights(model)


def _weights(model: nn.Module) -> torch.Tensor:
    """Return all weights, gathered from all ranks if they are sharded."""
    found = (one.detach() for one in model.parameters())
    return torch.cat([getattr(one, "full_tensor", lambda one=one: one)().reshape(-1) for one in found])


def _row(
    d: Distributon, settings: Settings, name: str, build: Contestant, expected: torch.Tensor
) -> dict[str, Any]:
    """Measure the parts of a step without a strategy, and then the step with it."""
    alone = name in ALONE
    part = settings.batch // d.world_size
    share = slice(0, settings.batch) if alone else slice(d.rank * part, (d.rank + 1) * part)
    count = settings.warmup + settings.repetitions
    batches = steps.build_batches(settings, settings.batch)
    before = (lambda: None) if alone else d.barrier
    times, bare, difference, peak = steps.StepTimes(), steps.StepTimes(), 0.0, 0
    d.barrier()
    if not alone or d.is_global_zero:
        model = steps.build_model(settings, d.device)
        bare = steps.train(model, steps.build_optimizer(model), batches, share, count, d.device, before)
        steps.reset_peak(d.device)
        try:
            wrapped, optimizer, close = build(steps.build_model(settings, d.device), d.device)
        except SlurmddpError as error:
            return {"strategy": name, "note": error.message}
        times = steps.train(wrapped, optimizer, batches, share, count, d.device, before)
        peak = peak_memory(d.device)
        difference = float((_weights(wrapped) - expected).abs().max())
        close()
    d.barrier()
    return {"strategy": name, **_columns(d, settings, times, bare, difference, peak)}


def _columns(
    d: Distributon,
    settings: Settings,
    times: steps.StepTimes,
    bare: steps.StepTimes,
    difference: float,
    peak: int,
) -> dict[str, Any]:
    """Return the columns of the slowest rank.

    The parts are means, so that a strategy that communicates in some of its steps is charged for them.
    """
    count = settings.warmup + settings.repetitions
    series = (times.whole, bare.gradients, bare.optimizer, bare.data)
    slowest = [of_slowest_rank(one or [0.0] * count, d.device)[settings.warmup :] for one in series]
    mean, compute, optimizer, data = map(statistics.fmean, slowest)
    worst, largest = of_slowest_rank([difference, float(peak)], d.device)
    return {
        **spread(slowest[0]),
        "mean_s": mean,
        "compute_s": compute,
        "exposed_s": mean - compute - optimizer - data,
        "optimizer_s": optimizer,
        "data_s": data,
        "peak_bytes": int(largest),
        "largest_difference": worst,
        "equals_one_process": worst <= TOLERANCE,
    }
