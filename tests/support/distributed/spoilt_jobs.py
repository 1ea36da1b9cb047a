"""Rank programs of test_finite: trainings whose gradients overflow, and states that hold NaN."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.errors import SlurmddpError
from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import Net, batch_of


class Overflowing(Net):
    """Model with an infinite gradient, but a finite loss, in training step `at`; with `marker`, only once."""

    def __init__(self, at: int, marker: str = "") -> None:
        super().__init__()
        self._at = at
        self._marker = marker
        self.last.weight.register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if int(self.seen) != self._at or (self._marker and self._is_spent()):
            return gradient
        return torch.full_like(gradient, torch.inf)

    def _is_spent(self) -> bool:
        try:
            Path(f"{self._marker}-{os.environ['RANK']}").touch(exist_ok=False)
        except FileExistsError:
            return True

        return False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return super().forward(x[:, 1:])


def refused_saves(root: str) -> dict[str, str]:
    """Return each rank's error at saves of good weights, of NaN on one rank, and of NaN on all ranks."""
    messages: dict[str, str] = {}
    with Distributon(seed=1) as d:
        d.launch()
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        d.backward(nn.functional.cross_entropy(model(batch_of(1)[0]), batch_of(1)[1]))
        optimizer.step()
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        d.save(1, root=root, **objects)
        with torch.no_grad():
            d.unwrap(model).hidden[1].weight[3, 2] = torch.nan
        saves = {
            "save": lambda: d.save(2, root=root, **objects),
            "no wait": lambda: d.save(3, root=root, wait=False, **objects),
            "memory": lambda: d.memory_save(4, root=root, **objects),
            "test": lambda: d.check_can_save(root=root, **objects),
        }
        for name, save in saves.items():
            try:
                save()
            except SlurmddpError as error:
                messages[name] = str(error)

    return messages


def saves_what_may_be_infinite(root: str) -> int | None:
    """Save a mask of -inf, frozen or in a buffer, and weights whose norm overflows though they are finite."""
    with Distributon(seed=1) as d:
        d.launch()
        net = Net()
        net.register_buffer("mask", torch.full((3,), -torch.inf))
        net.frozen = nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)
        model = d.setup_model(net)
        with torch.no_grad():
            net.last.weight.fill_(3e38)
        d.save(1, root=root, model=model, empty=nn.Sequential())
        return d.load(root=root, model=model)
