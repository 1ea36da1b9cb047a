"""Rank programs of test_contract: one training under many strategies, with and without their reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.collectives import ALGORITHMS
from slurmddp.strategies import Strategy, build
from slurmddp.strategies.ddp import Ddp
from slurmddp.strategies.gradient_server import GradientServer
from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import Net, batch_of

Case = tuple[str, dict[str, Any]]

CPU = torch.device("cpu")
OWN = "support.own.strategy.MeanOfEachGradient"
ALONE: list[Case] = [("single", {}), ("data_parallel", {})]
"""Strategies of one rank."""
CASES: list[Case] = [
    ("ddp", {}),
    ("ddp", {"static_graph": True}),
    ("ddp", {"find_unused_parameters": True, "bucket_mb": 0.001}),
    ("ddp", {"zero_optimizer": True}),
    *(("ring", {"algorithm": name}) for name in ALGORITHMS),
    ("fsdp", {}),
    ("parameter_server", {}),
    ("local_sgd", {"every": 1}),
    ("diloco", {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}),
    (OWN, {}),
]
"""Every strategy of several ranks, with the options under which it computes the steps of one process."""


def trained(strategy: Strategy, removed: bool = False, device: torch.device = CPU) -> dict[str, Any]:
    """Train three steps of one or two backward passes on this rank's part of common batches.

    Args:
        strategy: wraps the model and the optimizer.
        removed: whether to leave out the reduction of DistributedDataParallel.
        device: where the model and the batches are.

    Returns:
        `weights`: whole parameters by name, and `unwrapped`: whether `unwrap` returned the model.
    """
    rank, size = (
        (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    )
    torch.manual_seed(5 + rank)  # All ranks begin with the weights of rank 0.
    net = Net(width=12).to(device)
    model = strategy.wrap(net, device)
    if removed and type(strategy) is Ddp and isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _local)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = getattr(strategy, "setup_optimizer", lambda given, model: given)(optimizer, model)
    for step, passes in enumerate((1, 2, 2)):
        for part in range(passes):
            x, y = (tensor.chunk(size)[rank] for tensor in batch_of(10 * step + part, 8, device))
            with strategy.no_sync(model) if part + 1 < passes else nullcontext():
                (nn.functional.cross_entropy(model(x), y) / passes).backward()

        optimizer.step()
        optimizer.zero_grad()

    weights = {
        name: getattr(parameter, "full_tensor", parameter.clone)().detach().cpu()
        for name, parameter in net.named_parameters()
    }
    getattr(strategy, "close", lambda: None)()
    return {"weights": weights, "unwrapped": strategy.unwrap(model) is net}


def _local(state, bucket):
    # The hook has no annotations, because torch would compare them with its own types.
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def _without_reductions() -> Iterator[None]:
    """Turn off all reductions, so that each rank keeps its own gradients and weights."""

    def own_part(output: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
        output.copy_(input.chunk(distributed.get_world_size())[distributed.get_rank()])

    apply = GradientServer._apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", lambda tensor, *_, **__: None)
        # torch 2.13 has renamed this function.
        is_renamed = hasattr(distributed, "reduce_scatter_single")
        name = "reduce_scatter_single" if is_renamed else "reduce_scatter_tensor"
        patch.setattr(distributed, name, own_part)
        patch.setattr("slurmddp.strategies.ring.all_reduce", lambda tensor, link, **_: tensor)
        patch.setattr(
            GradientServer, "_apply", lambda server, gradients: apply(server, gradients[:1] * len(gradients))
        )
        yield


def training_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return one training under a strategy, with its reductions."""
    with Distributon() as d:
        d.launch()
        return trained(build(name, **options), device=d.device)


def contract(cases: Sequence[Case]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the training of each case, and the same training without its reduction."""
    with Distributon() as d:
        d.launch()
        results = []
        for name, options in cases:
            whole = trained(build(name, **options), device=d.device)
            with _without_reductions():
                local = trained(build(name, **options), removed=True, device=d.device)
            results.append((whole, local))

        return results
