"""Loaders of one rank without a process group, and data that draws random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.loader import distribute


def loader_of(
    data: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    seed: int = 4,
    accumulate: int = 1,
    even: bool = True,
    keep_global_batch: bool = False,
    **options: Any,
) -> DistributedLoader:
    """Return the loader of one of `ranks` ranks; `options` are options of DataLoader."""
    return distribute(
        DataLoader(data, **options),
        device=torch.device("cpu"),
        info=RankInfo(environment="local", rank=rank, world_size=ranks, local_world_size=ranks),
        seed=seed,
        accumulate=accumulate,
        even=even,
        keep_global_batch=keep_global_batch,
    )


def epoch_of(loader: DistributedLoader) -> list[list[Any]]:
    return [batch.tolist() for batch in loader]


class Augmented(Dataset[Any]):
    """Data set whose samples draw random numbers from the generators of Python, torch and NumPy."""

    opened_by: int | None = None

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)
