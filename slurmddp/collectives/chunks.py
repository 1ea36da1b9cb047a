"""Cut tensors into chunks of elements, as evenly as possible."""

from __future__ import annotations

from itertools import pairwise

import torch


def edges(size: int, count: int) -> list[int]:
    """Return the indices at which `count` chunks of `size` elements begin, and the end of the last chunk."""
    return [number * size // count for number in range(count + 1)]


def chunks(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return `count` neighbouring views of a tensor of one dimension; lengths differ by one at most.

    If the tensor has fewer than `count` elements, some views are empty.
    """
    return [flat[begin:end] for begin, end in pairwise(edges(flat.numel(), count))]
