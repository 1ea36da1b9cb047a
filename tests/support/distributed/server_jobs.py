"""Rank programs of test_parameter_server."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import distributed, nn

from slurmddp.errors import ConfigError, RankFailure
from slurmddp.strategies.parameter_server import ParameterServer
from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import Net, batch_of, step_on, weights


def beside_a_slow_rank(staleness: int, steps: int, root: str) -> dict[str, Any]:
    """Train with a rank 1 that is slow at first.

    Return counts, losses, and the weights and states of two saves.
    """
    server = ParameterServer(staleness=staleness)
    with Distributon(strategy=server, seed=1) as d:
        d.launch()
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
        _refused(model, optimizer)
        losses = []
        saved = []
        store = distributed.distributed_c10d._get_default_store()

        for step in range(2 * steps):
            if step == 0 and d.rank == 1:
                store.wait(["ahead"])
            if step == staleness and d.rank == 0:
                store.set("ahead", "by as many steps as the bound")
            x, y = batch_of(100 * (step % 4) + d.rank)
            losses.append(nn.functional.cross_entropy(model(x), y).item())
            step_on(model, optimizer, x, y)
            if step in (steps - 1, 2 * steps - 1):
                d.save(step, model=model, optimizer=optimizer, root=root)
                saved.append((weights(model), copy.deepcopy(optimizer.state_dict()["state"])))

        counts = server.counts()

    assert server.counts()["staleness"] == counts["staleness"], "the counts can be read after the end"
    return {"counts": counts, "losses": losses, "saved": saved}


def _refused(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Return the errors for steps and parameters that the server refuses."""
    with pytest.raises(ConfigError, match="can't call a closure"):
        optimizer.step(lambda: 0.0)
    parameter = next(model.parameters())
    parameter.grad = torch.zeros_like(parameter).to_sparse()
    with pytest.raises(ConfigError, match="can't send sparse gradients"):
        optimizer.step()
    parameter.grad = None
    with pytest.raises(ConfigError, match="added after setup_optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def resumed_counts(staleness: int, root: str) -> tuple[list[int], bool]:
    """Load a checkpoint; return the counts, and whether the next step changes the loaded weights little."""
    server = ParameterServer(staleness=staleness)
    with Distributon(strategy=server, seed=1) as d:
        d.launch()
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
        d.load(model=model, optimizer=optimizer, root=root)
        loaded = weights(model)
        counts = server.counts()["staleness"]
        step_on(model, optimizer, *batch_of(d.rank))
        moved = weights(model)
        return counts, all(torch.allclose(loaded[name], moved[name], atol=0.5) for name in loaded)


def options_of_a_step() -> dict[str, Any]:
    """Train two models with accumulation, clipping in fp16, an infinite gradient and unused parameters."""
    with Distributon(strategy="parameter_server", precision="fp16", seed=2) as d:
        d.launch()
        models = d.setup_model(Net(), nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)}))
        optimizers = d.setup_optimizer(
            *(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1) for model in models)
        )
        unused = weights(models[1]["unused"])

        for step in range(3):
            for part in range(2):
                x, y = batch_of(10 * step + part + 100 * d.rank)
                with d.accumulating(models[0], last=part == 1):
                    loss = nn.functional.cross_entropy(models[0](x), y)
                    # In the second step one rank has an infinite gradient, and leaves its gradient out.
                    d.backward(loss * (1e30 if step == 1 and d.rank == 1 else 1), accumulate=2)

            d.clip_gradients(models[0], max_norm=0.5)
            d.backward(models[1]["used"](x).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return {
            "models": [weights(model) for model in models],
            "unused stays": all(
                torch.equal(value, unused[name]) for name, value in weights(models[1]["unused"]).items()
            ),
            "finite": all(
                value.isfinite().all() for model in models for value in model.state_dict().values()
            ),
        }


def after_a_rank_has_died(staleness: int) -> str:
    """Return this rank's error after rank 1 has exited without reporting its last step."""
    d = Distributon(strategy=ParameterServer(staleness=staleness), seed=1, collective_timeout_s=60)
    d.launch()
    model = d.setup_model(Net())
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    for step in range(5):
        if step == 2 and d.rank == 1:
            return "died"  # `run_ranks` ends this process without a message to the others.

        try:
            step_on(model, optimizer, *batch_of(step))
        except RankFailure as error:
            if d.rank == 0:  # Its end would be the first error of a rank that has not got the answer yet.
                time.sleep(1)
            return str(error)

    return "none"
