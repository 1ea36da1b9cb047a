"""A data set of the project, found by its import path."""

import torch
from torch.utils.data import Dataset

CHARACTERS = "0123456789+="


class Sums(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sums such as `027+005=2300`, one token per character; the result is written from its last digit on.

    A sample is (inputs, targets), each of shape (11,), int64. The targets are the inputs shifted by one.

    Args:
        count: number of samples for training.
        first: index of the first sample; sets with disjoint ranges have no sample in common.
    """

    deterministic = True

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self.first = first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = divmod((self.first + index) * 7919 % 1_000_000, 1000)
        text = f"{a:03}+{b:03}=" + f"{a + b:04}"[::-1]
        ids = torch.tensor([CHARACTERS.index(character) for character in text])
        return ids[:-1], ids[1:]

    def heldout(self) -> "Sums":
        """Return 1000 samples that follow the training samples."""
        return Sums(1000, first=self.first + self.count)
