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
"""Bits of a random number."""


class WeightedSampler(RankSampler):
    """Yield this rank's part of `n` draws per epoch, each sample in proportion to its weight.

    With replacement, a draw inverts the cumulative distribution of the weights, in O(log samples) time.
    Without replacement, no sample comes twice in an epoch; that needs one sort per epoch (Efraimidis and
    Spirakis, "Weighted random sampling with a reservoir", 2006). The position counts draws.

    Args:
        n: the number of draws of an epoch.
        weights: a finite number of 0 or more for each sample; they need not sum to 1.
        replacement: whether a sample may come more than once in an epoch.
        options: see `RankSampler`; `keyed` yields tuples (index, epoch, position).

    Raises:
        ConfigError: a weight is invalid, or `n` exceeds the samples of some weight without replacement.
    """

    def __init__(self, n: int, weights: Sequence[float], *, replacement: bool = True, **options: Any) -> None:
        array = np.asarray(weights, dtype=np.float64)
        if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any() or not array.any():
            raise ConfigError(
                "The weights of the samples are not finite numbers of 0 or more with some above 0.",
                hint="Give one weight per sample.",
            )

        drawable = int((array > 0).sum())
        if not replacement and n > drawable:
            raise ConfigError(
                f"{n} draws without replacement need as many samples of some weight; there are {drawable}.",
                hint="Draw fewer, or with replacement.",
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
                "The checkpoint's data order was drawn by other weights, or by none.",
                hint="Give the sampler the weights of the run that wrote it, or start a run of another name.",
            )
        super().load_state_dict(state)

    def _with_keys(self, indices: Iterator[int]) -> Iterator[tuple[int, ...]]:
        """Add the position too, so that a sample drawn twice in an epoch is augmented differently."""
        return zip(indices, repeat(self.epoch), self._positions())

    def _indices(self) -> Callable[[range], Iterable[int]]:
        if not self._replacement:
            order = _draw_without_replacement(self._weights, self.n, self.seed, self.epoch)
            return lambda at: order[at.start : at.stop : at.step].tolist()

        ends = np.cumsum(self._weights)
        ends /= ends[-1]
        return lambda at: np.searchsorted(ends, _uniform(at, self.seed, self.epoch), side="right").tolist()


def _draw_without_replacement(weights: Floats, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Draw an exponential time for each sample, at its weight as the rate; return the n first samples."""
    drawable = np.flatnonzero(weights)
    times = -np.log1p(-_uniform(range(len(weights)), seed, epoch)[drawable]) / weights[drawable]
    return drawable[np.argsort(times, kind="stable")[:n]]


def _uniform(positions: range, seed: int, epoch: int) -> Floats:
    """Return a random number in [0, 1) for each position."""
    # Elements of a permutation never repeat, unlike random numbers; among 2^48 elements nothing shows it.
    permutation = Permutation(1 << _BITS, seed, epoch, "weights")
    elements = permutation.block(positions.start, positions.stop, positions.step)
    return np.multiply(elements, 2.0**-_BITS, dtype=np.float64)
