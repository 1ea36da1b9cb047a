"""Draw samples by weight, as a pure function of (seed, epoch, global position).

`torch.utils.data.WeightedRandomSampler` draws a whole epoch from one generator. All ranks then draw the same
samples, and reading can't resume in the middle. Here a random number follows from each position of an epoch.
So ranks divide the draws like the positions of a permutation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.data.permutation import Permutation
from slurmddp.training.data.sampler import RankSampler

Floats = NDArray[np.float64]
_BITS = 48
"""Number of bits of each random number."""


class WeightedSampler(RankSampler):
    """Sampler that yields this rank's part of `n` random draws per epoch; weights are relative probabilities.

    With replacement, each draw inverts the cumulative distribution of the weights, in O(log samples) time.
    Without replacement, no sample comes twice in an epoch, and each epoch needs one sort (Efraimidis and
    Spirakis, "Weighted random sampling with a reservoir", 2006). Positions in an epoch count draws.

    Args:
        n: the number of draws of an epoch.
        weights: a finite number of 0 or more for each sample; they need not sum to 1.
        replacement: whether a sample may come more than once in an epoch.
        options: see `RankSampler`; `keyed` yields tuples (index, epoch, position).

    Raises:
        ConfigError: a weight is invalid, or without replacement fewer than `n` samples have a weight above 0.
    """

    def __init__(self, n: int, weights: Sequence[float], *, replacement: bool = True, **options: Any) -> None:
        array = np.asarray(weights, dtype=np.float64)
        if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any() or not array.any():
            raise ConfigError(
                "The weights of the samples must be finite numbers of 0 or more, at least one above 0.",
                hint="Give one such number per sample.",
            )

        drawable = int((array > 0).sum())
        if not replacement and n > drawable:
            raise ConfigError(
                f"{n} draws without replacement need {n} samples with weights above 0; there are {drawable}.",
                hint="Set a smaller num_samples, or replacement=True.",
            )

        super().__init__(n, shuffle=True, **options)
        self._weights = array
        self._replacement = replacement
        self._digest = hashlib.sha256(array.tobytes() + bytes([replacement])).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("weights") != self._digest:
            raise MismatchError(
                "The order of the data in the checkpoint was drawn by other weights, or without weights.",
                hint="Use the weights of the run that wrote the checkpoint, or start a run of another name.",
            )
        super().load_state_dict(state)

    def _with_keys(self, indices: Iterator[int]) -> Iterator[tuple[int, ...]]:
        """Yield a tuple (index, epoch, position) for each index.

        With the position, a sample that is drawn twice in an epoch is augmented differently each time.
        """
        return zip(indices, repeat(self.epoch), self._positions())

    def _indices(self) -> Callable[[range], Iterable[int]]:
        if not self._replacement:
            order = _draw_without_replacement(self._weights, self.n, self.seed, self.epoch)
            return lambda at: order[at.start : at.stop : at.step].tolist()

        ends = np.cumsum(self._weights)
        ends /= ends[-1]
        return lambda at: np.searchsorted(ends, _uniform(at, self.seed, self.epoch), side="right").tolist()


def _draw_without_replacement(weights: Floats, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return `n` different sample indices in random order, drawn by weight.

    Each sample gets an exponentially distributed time with its weight as the rate. The `n` samples with the
    shortest times are returned, in the order of their times.
    """
    drawable = np.flatnonzero(weights)
    times = -np.log1p(-_uniform(range(len(weights)), seed, epoch)[drawable]) / weights[drawable]
    return drawable[np.argsort(times, kind="stable")[:n]]


def _uniform(positions: range, seed: int, epoch: int) -> Floats:
    """Return a random number in [0, 1) for each position, a function of position, seed and epoch."""
    # Unlike random numbers, the elements of a permutation never repeat. With 2^48 elements the difference
    # can't be noticed.
    permutation = Permutation(1 << _BITS, seed, epoch, "weights")
    elements = permutation.block(positions.start, positions.stop, positions.step)
    return np.multiply(elements, 2.0**-_BITS, dtype=np.float64)
