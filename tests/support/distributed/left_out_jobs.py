"""Rank programs of test_left_out_steps: trainings with a step that is left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slurmddp.strategies import build
from slurmddp.training.distributon import Distributon
from slurmddp.training.precision import LossScaler

BAD_STEP = 6


def history(options: dict[str, Any], ending: str) -> list[list[torch.Tensor]]:
    """Train 10 steps, the bad one with infinite gradients; return this rank's weights after each step.

    Args:
        options: the name of a strategy, by default ddp, and its options.
        ending: of the bad step. "absent": it has no backward pass. "cleared": the optimizer steps without
            gradients. "skipped": the program does not call the optimizer.
    """
    options = dict(options)
    with Distributon(strategy=build(options.pop("name", "ddp"), **options)) as d:
        d.launch()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 5)).double()
        model = d.setup_model(net)
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        seen = []

        for step in range(10):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + d.rank)).double()
            is_bad = step == BAD_STEP
            if not (is_bad and ending == "absent"):
                factor = float("inf") if is_bad and d.rank == 1 else 1.0
                d.backward(model(inputs).square().mean() * factor)

            if is_bad:
                optimizer.zero_grad()
            if not (is_bad and ending == "skipped"):
                optimizer.step()
            optimizer.zero_grad()
            seen.append([parameter.detach().clone() for parameter in net.parameters()])

        return seen


def one_of_two_optimizers_left_out() -> tuple[torch.Tensor, list[bool]]:
    """Train two layers by an optimizer each, and leave out a step of the second layer's optimizer.

    Return the last errors, and for each layer whether they stayed.
    """
    strategy = build("ddp", comm_hook="powersgd", hook_start_step=2)
    with Distributon(strategy=strategy) as d:
        d.launch()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model = d.setup_model(net)
        optimizers = [d.setup_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in net]
        errors = []

        for step in range(5):
            d.backward(model(torch.randn(4, 8)).square().mean())
            if step == 4:
                optimizers[1].zero_grad()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

            (error,) = strategy.state_dict()["hooks"][0]["errors"].values() if step > 2 else (None,)
            errors.append(error)

        # Buckets hold parameters from last to first.
        second, first = (errors[4] == errors[3]).view(2, 64)
        return errors[4], [bool(first.all()), bool(second.all())]


def lost_gradient(growth_interval: int, bad_step: int | None) -> tuple[float, float]:
    """Train in fp16 by PowerSGD; return the missing part of the gradients, and the last loss scale.

    The sum of all applied gradients and the mean error must be the sum of the gradients of all taken steps.

    Args:
        growth_interval: steps after which the loss scale doubles.
        bad_step: the step in which rank 1 has infinite gradients.
    """
    strategy = build("ddp", comm_hook="powersgd", hook_start_step=2)
    with Distributon(precision="fp16", strategy=strategy) as d:
        d.launch()
        torch.manual_seed(0)
        model = d.setup_model(nn.Linear(8, 8, bias=False))
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        scaler = d._scaler
        assert isinstance(scaler, LossScaler)
        scaler.load_state_dict(
            {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 0}
            | {"growth_interval": growth_interval}
        )
        first = d.unwrap(model).weight.detach().clone()
        generator = torch.Generator().manual_seed(1 + d.rank)
        total = torch.zeros(8, 8)

        for step in range(12):
            gradient = torch.randn(8, 8, generator=generator)
            factor = float("inf") if step == bad_step and d.rank == 1 else 1.0
            d.backward((model(torch.eye(8)).T * gradient).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
            if step != bad_step:
                total += gradient

        (error,) = strategy.state_dict()["hooks"][0]["errors"].values()
        applied = first - d.unwrap(model).weight.detach()
        missing = d.all_reduce(total) - d.all_reduce(error.view(8, 8)) - applied
        return missing.abs().max().item(), float(scaler.state_dict()["scale"])


def equal_after_each_step(optimizers: int) -> list[bool]:
    """Train a model by post-local SGD; return after which steps the ranks' weights were equal."""
    options: dict[str, Any] = {"hook_start_step": 4, "average_every": 4, "group_ranks": 1}
    with Distributon(strategy=build("ddp", comm_hook="post_local_sgd", **options)) as d:
        d.launch()
        torch.manual_seed(0)
        model = d.setup_model(nn.Linear(3, 1))
        parameters = list(model.parameters())
        shares = [parameters] if optimizers == 1 else [[parameter] for parameter in parameters]
        made = [d.setup_optimizer(torch.optim.SGD(share, lr=0.1)) for share in shares]
        equal = []

        for _ in range(13):
            d.backward((model(torch.ones(1, 3) * (d.rank + 1)) - 1).square().sum())
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()

            copies = d.all_gather(torch.cat([parameter.detach().flatten() for parameter in parameters]))
            equal.append(all(torch.equal(copy, copies[0]) for copy in copies))

        return equal
