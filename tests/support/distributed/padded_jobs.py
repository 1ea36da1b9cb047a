"""Rows of tokens with padding, a model of them, and a rank program that trains it by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.strategies import build
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer import train

LENGTH = 11


class Rows(Dataset[Any]):
    """Rows of 1 to 11 valid targets; the others are padding."""

    deterministic = True

    def __init__(self, size: int = 40, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, LENGTH, 5, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(4, (size, LENGTH), generator=generator)
        for row in range(size):
            self.targets[row, 1 + (7 * row + seed) % LENGTH :] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def heldout(self) -> Dataset[Any]:
        return Rows(13, seed=1)


class Tokens(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))
        self.double()


def trained(config: dict[str, Any], folder: str, strategy: dict[str, Any]) -> None:
    """Train by the default trainer, with the settings of `config`."""
    options = dict(strategy)
    with Distributon(seed=0, strategy=build(options.pop("name"), **options)) as d:
        train(d.launch(), config, RunFolder(Path(folder)))
