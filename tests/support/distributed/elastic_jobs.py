"""Rank programs of the elastic tests: a training that notes which samples each step reads."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import batch_of
from support.distributed.trainer_jobs import train_once


class Noted(Dataset[Any]):
    """Classes to learn from six numbers, blurred again at each reading; writes down what is read."""

    def __init__(self, notes: str, size: int = 400, blur: float = 0.0) -> None:
        self._notes, self._size, self._blur = Path(notes), size, blur

    def __len__(self) -> int:
        return self._size

    def heldout(self) -> Dataset[Any]:
        return Noted(str(self._notes / "heldout"), 30, self._blur)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._notes.mkdir(parents=True, exist_ok=True)
        with (self._notes / f"rank-{os.environ.get('RANK', 0)}").open("a") as file:
            file.write(f"{index}\n")
        x, y = batch_of(index, 1)
        noise = torch.randn(6) + random.random() + float(np.random.rand())
        return x[0] + self._blur * noise, y[0]


def train(config: dict[str, Any], notes: str, folder: str, stop_after: int | None) -> str:
    data = {**config["data"], "notes": notes}
    return train_once({**config, "data": data}, folder, stop_after)


class Endless(IterableDataset[Any]):
    """Its own part of the numbers from 0 on, for each rank; knows how far it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.tensor(self.at * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"]))
            self.at += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def read_stream(root: str, batches: int) -> list[list[int]]:
    """Resume reading from the newest checkpoint, save after `batches` more, and return the samples read."""
    with Distributon(seed=0) as d:
        d.launch()
        loader = d.setup_dataloader(DataLoader(Endless(), batch_size=3))
        step = d.load(root) or 0
        seen = [batch.tolist() for batch in itertools.islice(loader, batches)]
        d.save(root, step + batches)
        return seen
