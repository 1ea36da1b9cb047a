"""Read a batch of a TensorDataset by one index into each tensor, instead of stacking its samples.

torch reads each sample alone and stacks them, which takes longer than the training step of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from slurmddp.training.data.seeding import DatasetWrapper


def stacks_tensors(loader: DataLoader[Any]) -> bool:
    """Decide whether `loader` reads a TensorDataset of plain tensors with torch's default collation."""
    data = loader.dataset
    if type(data) is not TensorDataset or loader.collate_fn is not default_collate:
        return False

    return all(type(tensor) is torch.Tensor and tensor.layout is torch.strided for tensor in data.tensors)


class WholeBatches(DatasetWrapper, Dataset[Any]):
    """A TensorDataset whose `__getitems__` returns a batch that is stacked already (see `as_it_is`)."""

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the samples `indices` as one batch: a list of tensors of shape (number of indices, ...)."""
        chosen = torch.tensor(indices)
        return [tensor[chosen] for tensor in self._inner.tensors]


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `batch` unchanged: the `collate_fn` for batches that are stacked already."""
    return batch
