"""Train a model under every strategy and under torch's wrappers; compare final weights and times of steps."""

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
"""Largest allowed difference of a final weight from the training in one process; rounding is far below."""

Built = tuple[nn.Module, Optimizer, Callable[[], object]]
"""A contestant: the model to call, its optimizer, and a function to call after the last step."""
Contestant = Callable[[nn.Module, torch.device], Built]
"""A function that wraps a model and builds its optimizer."""


def _nothing() -> None:
    """Do nothing: for a wrapper without `close`, and for a training without a barrier before its steps."""


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
        if setup:
            optimizer = setup(optimizer, wrapped)

        return wrapped, optimizer, getattr(strategy, "close", _nothing)

    return build


ALONE: Mapping[str, Contestant] = {"single": _single, "data_parallel": _data_parallel}
"""Contestants of one process: rank 0 trains on the whole batch, and the other ranks wait."""


def contestants() -> dict[str, Contestant]:
    """Return the builder of each contestant by name: slurmddp's strategies and torch's own wrappers."""
    shipped = {name: _strategy(name) for name in strategies.STRATEGIES if name not in ALONE}
    return {**ALONE, "torch DDP": _torch_ddp, "torch FSDP": _torch_fsdp, **shipped}


def measure_strategies(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Train the model under every contestant, and return the rows of the table `strategies`.

    All ranks call it.
    """
    expected = _reference(settings, d.device)
    rows = [_row(d, settings, name, build, expected) for name, build in contestants().items()]
    return {"strategies": rows}


def _reference(settings: Settings, device: torch.device) -> torch.Tensor:
    """Train on whole batches in this process alone, and return the final weights as a flat tensor."""
    model = steps.build_model(settings, device)
    batches = steps.build_batches(settings, settings.batch)
    share = slice(0, settings.batch)
    count = settings.warmup + settings.repetitions
    steps.train(model, steps.build_optimizer(model), batches, share, count, device)
    return _weights(model)


def _weights(model: nn.Module) -> torch.Tensor:
    """Return all weights of a model as one flat tensor; sharded weights are gathered from all ranks."""
    weights = []
    for parameter in model.parameters():
        tensor: Any = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        weights.append(tensor.reshape(-1))

    return torch.cat(weights)


def _row(
    d: Distributon, settings: Settings, name: str, build: Contestant, expected: torch.Tensor
) -> dict[str, Any]:
    """Train the bare model and then the wrapped model, and return the contestant's row of the table.

    Args:
        d: a launched Distributon.
        settings: the settings of the benchmark.
        name: name of the contestant.
        build: wraps the model and builds the optimizer.
        expected: the final weights of the training in one process.

    Returns:
        The columns of `_columns`; if `build` raises SlurmddpError, only its message, as `note`.
    """
    alone = name in ALONE
    samples = settings.batch // d.world_size
    share = slice(d.rank * samples, (d.rank + 1) * samples)
    before: Callable[[], object] = d.barrier
    if alone:
        share = slice(0, settings.batch)
        before = _nothing
    count = settings.warmup + settings.repetitions
    batches = steps.build_batches(settings, settings.batch)

    times = steps.StepTimes()
    bare = steps.StepTimes()
    difference = 0.0
    peak = 0
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
    """Return the columns of a contestant's row; times, memory and difference are maxima over all ranks.

    The parts of a step are means, not medians, because some strategies communicate only in some of the steps.

    Args:
        d: a launched Distributon.
        settings: the settings of the benchmark.
        times: the times of the wrapped model.
        bare: the times of the bare model. The time of `times` beyond them is exposed communication.
        difference: the largest difference of a final weight from the training in one process.
        peak: the peak memory in bytes.
    """
    zeros = [0.0] * (settings.warmup + settings.repetitions)

    def of_slowest(seconds: list[float]) -> list[float]:
        """Return the maximum over all ranks for each step after the warm-up.

        A rank that has not trained passes an empty list, which counts as zeros.
        """
        return of_slowest_rank(seconds or zeros, d.device)[settings.warmup :]

    whole = of_slowest(times.whole)
    mean_s = statistics.fmean(whole)
    compute_s = statistics.fmean(of_slowest(bare.gradients))
    optimizer_s = statistics.fmean(of_slowest(bare.optimizer))
    data_s = statistics.fmean(of_slowest(bare.data))
    largest_difference, peak_bytes = of_slowest_rank([difference, float(peak)], d.device)

    return {
        **spread(whole),
        "mean_s": mean_s,
        "compute_s": compute_s,
        "exposed_s": mean_s - compute_s - optimizer_s - data_s,
        "optimizer_s": optimizer_s,
        "data_s": data_s,
        "peak_bytes": int(peak_bytes),
        "largest_difference": largest_difference,
        "equals_one_process": largest_difference <= TOLERANCE,
    }
