"""The training of all ways of goodput.py: model, data, and the marks of its steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

BATCH = 8
WIDTH = 256
CLASSES = 8


class Net(nn.Module):
    """A small network. A pause in the forward pass stands for a GPU's work, which needs no CPU."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        time.sleep(self.step_s)
        return self.layers(inputs)


class Samples(Dataset[Any]):
    """Samples of one epoch, each of which follows from its index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), index % CLASSES


class Marks:
    """Files with the pid of each rank, and with the time at which rank 0 has completed each step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def begin(self, rank: int) -> None:
        """Write the pid of a rank, which a fault may kill."""
        (self.folder / f"pid-{rank}").write_text(str(os.getpid()))

    def step(self, rank: int, step: int) -> None:
        """Write the time of a completed step."""
        if rank == 0:
            with (self.folder / "steps").open("a") as stream:
                stream.write(f"{step} {time.time()!r}\n")


class Callback(Marks):
    """The marks as a callback of slurmddp's trainer."""

    def on_train_start(self, training: Any) -> None:
        """Mark the start of a rank."""
        self.begin(training.distributon.rank)

    def on_step_end(self, training: Any) -> None:
        """Mark a completed step."""
        self.step(training.distributon.rank, training.step)
