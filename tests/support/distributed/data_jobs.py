"""Data sets of test_dataset: iterable data sets, and a data set whose samples have weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, Subset

from slurmddp.training.trainer import accuracy
from support.distributed.rank_jobs import Net

Pair = tuple[torch.Tensor, torch.Tensor]


def pair(number: int) -> Pair:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, generator=generator) + random.random(), torch.randint(3, (), generator=generator)


class Unshared(IterableDataset[Any]):
    """An iterable data set of `count` augmented pairs, without methods for readers or for its position."""

    def __init__(self, count: int = 83) -> None:
        self.count = count
        self.passed = 0
        self.epoch = 0
        self.share = (0, 1)

    def __iter__(self) -> Iterator[Pair]:
        part, parts = self.share
        self.passed = 0
        while (number := self.passed * parts + part) < self.count:
            self.passed += 1
            yield pair(number + 1000 * self.epoch)


class Shared(Unshared):
    def set_share(self, part: int, parts: int) -> None:
        self.share = part, parts

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Placed(Shared):
    """A data set that reports its position, so that a resume does not read trained samples again."""

    start = 0

    def __iter__(self) -> Iterator[Pair]:
        part, parts = self.share
        self.passed = self.start
        self.start = 0
        while (number := self.passed * parts + part) < self.count:
            self.passed += 1
            yield pair(number + 1000 * self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["passed"]


class HeldoutStream(Unshared):
    def heldout(self) -> Unshared:
        return Unshared()


class Weighted(Dataset[Any]):
    """A data set of a hundred samples, of which the last ninety have the weight 0."""

    def __init__(self, weights: Any = (1.0,) * 4 + (3.0,) * 6 + (0.0,) * 90) -> None:
        self.sample_weights = weights

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Pair:
        assert index < 10, "a sample without weight was read"
        return pair(index)


class Named(Dataset[Any]):
    """The samples of `Weighted`, each a dict; `collate` gives the batch the names of `Judge`'s arguments."""

    def __init__(self, size: int = 40) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return dict(zip(("features", "label"), pair(index), strict=True))

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        return {
            "x": torch.stack([sample["features"] for sample in samples]),
            "labels": torch.stack([sample["label"] for sample in samples]),
        }

    def heldout(self) -> Dataset[Any]:
        return Subset(self, range(10))


class Paired(Named):
    """The samples of `Named` as pairs, which torch's default function collates."""

    collate = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return pair(index)


class Judge(Net):
    """A model that returns its loss beside its logits."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def accuracy_of_judge(outputs: Any, batch: Any) -> Any:
    return accuracy(outputs["logits"], batch["labels"])


class WeightedStream(Unshared):
    sample_weights = (1.0,)
