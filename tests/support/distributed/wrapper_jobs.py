"""Rank programs of test_wrappers: a model with tied weights, before, during and after a training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.training.distributon import Distributon

HANDLED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Tied(nn.Module):
    """Predicts the next of eleven tokens; input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.tokens(ids)))
        return scores


def surroundings() -> tuple[dict[str, str], list[Any], bool]:
    """Return the state that a rank must leave unchanged: variables, signal handlers, and no process group."""
    return (
        dict(os.environ),
        [signal.getsignal(number) for number in HANDLED],
        torch.distributed.is_initialized(),
    )


def train_tied(folder: str, steps: int) -> dict[str, Any]:
    """Load the newest checkpoint in the folder, train, save; return the weights and the changed state."""
    os.chdir(folder)
    before = surroundings()
    with Distributon(seed=3) as d:
        d.launch()
        bare = Tied()
        model = d.setup_model(bare)
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        step = d.load(model=model, optimizer=optimizer) or 0
        loaded = {name: value.clone() for name, value in bare.state_dict().items()}

        for number in range(step, step + steps):
            assert not d.should_stop()
            ids = (torch.arange(4) + number + 4 * d.rank) % 11
            d.backward(nn.functional.cross_entropy(model(ids), (ids + 1) % 11))
            optimizer.step()
            optimizer.zero_grad()

        d.save(step + steps, model=torch.compile(model), optimizer=optimizer)
        compiled = torch.compile(model)  # Only the call would run the compiler.
        with d.accumulating(compiled, last=False):
            averages = getattr(model, "require_backward_grad_sync", False)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        results = {
            "step": step,
            "loaded": loaded,
            "weights": {name: value.clone() for name, value in bare.state_dict().items()},
            "device": all(parameter.device == d.device for parameter in bare.parameters()),
            "wrapped": type(model).__name__,
            "tied": bare.head.weight is bare.tokens.weight,
            "optimizer holds them": held == {id(parameter) for parameter in bare.parameters()},
            "through the compiler": d.unwrap(compiled) is bare and not averages,
            "group": torch.distributed.is_initialized(),
            "changed": surroundings() != before,
        }

    d.close()
    return {
        **results,
        "left": surroundings() == before,
        "saved": sorted(map(str, Path("checkpoints").iterdir())),
    }
