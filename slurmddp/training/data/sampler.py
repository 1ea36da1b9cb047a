"""Give each rank its samples of an epoch, from any global position on.

The sample at a position is a pure function of (seed, epoch, position). Rank r of w reads the positions r, r +
w, r + 2w, ... So the samples of a global batch follow from its positions alone, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

from torch.utils.data import Sampler

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.data.permutation import Permutation

_BLOCK = 16384
"""How many sample indices are computed at once."""
_FIRST_BLOCK = 256
"""The length of the first block, short so that the first batch comes early."""


def shard_range(n: int, rank: int, world_size: int) -> range:
    """Return this rank's contiguous part of 0..n-1, for an evaluation.

    Each index is in the part of exactly one rank.
    """
    return range(n * rank // world_size, n * (rank + 1) // world_size)


class RankSampler(Sampler[Any]):
    """Sampler that yields this rank's sample indices of one epoch, from the position of the last `seek` on.

    The state to save is (seed, epoch, position). The position is the number of samples that all ranks have
    trained together. The training reports them by `advance`, because loader workers fetch samples early.

    Args:
        n: the number of samples of an epoch.
        rank: this rank.
        world_size: the number of ranks.
        batch_size: the samples that one rank trains per optimizer step (micro-batch times accumulation).
        seed: seed of the order, together with the epoch.
        shuffle: whether the order is a permutation; else it is 0, 1, 2, ...
        drop_last: whether to leave out the last incomplete global batch of an epoch.
        even: whether to leave out the last `n % world_size` samples, so that all ranks get equally many;
            `drop_last` implies it. With neither, each sample comes exactly once, and the last batch is
            smaller, or missing on some ranks.
        keyed: whether to yield tuples (index, epoch), for `SeededSamples`, instead of indices.
        checks_size: whether the constructor checks that the data fill one step. If false, only the first
            iteration does, after a load may have changed `batch_size`.

    Raises:
        ConfigError: a size is out of range, or there are too few samples.

    Example:
        >>> list(RankSampler(10, rank=1, world_size=3, shuffle=False, drop_last=False))
        [1, 4, 7]
    """

    def __init__(
        self,
        n: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        even: bool = False,
        keyed: bool = False,
        checks_size: bool = True,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"There is no rank {rank} among {world_size} ranks.")
        if batch_size < 1:
            raise ConfigError(f"The batch size is {batch_size}.", hint="It must be at least 1.")

        if even and n < world_size:
            raise ConfigError(
                f"The data set has {n} sample(s), fewer than the {world_size} ranks.",
                hint="Use fewer ranks or more data, or set even=False: some ranks then get no sample.",
            )

        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self.batch_size = batch_size
        self._drop_last = drop_last
        self._even = even
        self._keyed = keyed
        self._rank = rank
        self._world_size = world_size
        self.epoch = 0
        self._start = 0
        """The global position at which the next iteration starts."""
        self.position = 0
        """How many samples of this epoch all ranks together have trained."""
        if checks_size:
            self._require_a_step()

    def _require_a_step(self) -> None:
        """Raise ConfigError if `drop_last` is set and the samples don't fill one step of all ranks."""
        needed = self.global_batch_size if self._drop_last else 1
        if self.n < needed:
            raise ConfigError(
                f"The data set has {self.n} samples; one step of {self._world_size} ranks with "
                f"{self.batch_size} samples each needs {needed}.",
                hint="Use a smaller batch, fewer ranks or more data.",
            )

    @property
    def global_batch_size(self) -> int:
        return self._world_size * self.batch_size

    def seek(self, epoch: int, position: int) -> None:
        """Set the epoch and the position at which the next iteration starts.

        Args:
            epoch: the epoch, from 0 on.
            position: the number of samples of the epoch, over all ranks, that come before.

        Raises:
            ConfigError: the epoch has no such position.
        """
        if epoch < 0 or not 0 <= position <= self.n:
            raise ConfigError(f"There is no position {position} in epoch {epoch} of {self.n} samples.")

        self.epoch = epoch
        self._start = position
        self.position = position

    def advance(self, samples: int) -> None:
        """Count `samples` more samples of all ranks together as trained, up to `n` samples in all."""
        self.position = min(self.position + samples, self.n)

    def __len__(self) -> int:
        """Return how many samples this rank gets from the last `seek` to the end of the epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[Any]:
        self._require_a_step()
        self.position = self._start

        # `chain` is faster: `yield from` would take as long per index as computing the index.
        indices = chain.from_iterable(self._blocks(self._positions()))
        if self._keyed:
            return self._with_keys(indices)
        return indices

    def _with_keys(self, indices: Iterator[int]) -> Iterator[tuple[int, ...]]:
        """Yield a tuple (index, epoch) for each index.

        `SeededSamples` seeds from the tuple, so that the sample is augmented differently in each epoch.
        """
        return zip(indices, repeat(self.epoch))

    def _blocks(self, positions: range) -> Iterator[Iterable[int]]:
        indices_at = self._indices()
        start = 0
        size = _FIRST_BLOCK
        while start < len(positions):
            yield indices_at(positions[start : start + size])
            start += size
            size = _BLOCK

    def _indices(self) -> Callable[[range], Iterable[int]]:
        """Return a function that returns the sample indices at a range of positions of the current epoch."""
        if not self.shuffle:
            return lambda positions: positions

        permutation = Permutation(self.n, self.seed, self.epoch)
        return lambda at: permutation.block(at.start, at.stop, at.step).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return seed, epoch and position, and the settings that must be the same to resume."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "samples": self.n,
            "shuffle": self.shuffle,
            "global_batch": self.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, which any number of ranks may have saved.

        Raises:
            MismatchError: the state has another number of samples, another seed, or `shuffle` differs.
        """
        for key, value in (("samples", self.n), ("seed", self.seed), ("shuffle", self.shuffle)):
            saved = state.get(key)
            if saved != value:
                raise MismatchError(
                    f"The data order in the checkpoint has {key}={saved!r}, but this run has {value!r}.",
                    hint="Train on the same data with the same settings, or start a run of another name.",
                )

        self.seek(state["epoch"], state["position"])

    def samples_left(self) -> int:
        """Return how many samples this rank still gets in the current epoch."""
        return len(range(self.position + self._rank, self._end_from(self._start), self._world_size))

    def samples_per_epoch(self) -> int:
        """Return how many samples this rank gets in a whole epoch."""
        return len(range(self._rank, self._end_from(0), self._world_size))

    def samples_after_last_step(self) -> int:
        """Return how many samples, over all ranks, are left after the last complete step of an epoch."""
        return self._end_from(0) % self.global_batch_size

    def _positions(self) -> range:
        return range(self._start + self._rank, self._end_from(self._start), self._world_size)

    def _end_from(self, start: int) -> int:
        """Return the global position at which an iteration from `start` ends."""
        if not (self._drop_last or self._even):
            return self.n

        # With `drop_last` an iteration ends after a whole global batch, and with `even` after equally many
        # samples on each rank.
        unit = self.global_batch_size if self._drop_last else self._world_size
        return start + (self.n - start) // unit * unit
