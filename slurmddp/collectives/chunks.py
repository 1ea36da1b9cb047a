"""Cut tensors into chunks of elements, as evenly as possible."""

from __future__ import annotations

from itertools import pairwise

import torch


def edges(size: int, count: int) -> list[int]:
    """Return the first index of each of `count` chunks of a tensor of `size` elements, and then `size`."""
    return [number * size // count for number in range(count + 1)]


def chunks(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return `count` consecutive views of a tensor of one dimension, whose lengths differ by at most one.

    If the tensor has fewer than `count` elements, some views are empty.
    """
    return [flat[begin:end] for begin, end in pairwise(edges(flat.numel(), count))]
