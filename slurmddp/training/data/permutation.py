"""The order of samples as a pure function of (seed, epoch, global position).

`torch.utils.data.DistributedSampler` draws a whole permutation on every rank: at 10^8 samples that takes
seconds and gigabytes, and its order can't be entered in the middle. Here a keyed permutation is computed
position by position: a Feistel network over a domain a little larger than `n`, walked along its cycle
until the value falls below `n` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It
needs constant memory, any position costs the same, and the number of ranks does not enter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from slurmddp.errors import ConfigError, MismatchError

ROUNDS = 6
"""Luby and Rackoff need 4 with ideal round functions; ours are plain mixers."""

MAX_SAMPLES = 1 << 48

TABLE_SIZE = 1 << 12
"""Up to here the permutation is kept as a table: a Feistel network of a few bits is visibly uneven."""

_FIRST_BLOCK, _BLOCK = 256, 16384
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF = np.uint64(32)

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]


class Permutation:
    """A permutation of 0..n-1 that `key` chooses; O(1) memory, any position in O(1)."""

    def __init__(self, n: int, *key: int | str) -> None:
        if not 0 <= n <= MAX_SAMPLES:
            raise ConfigError(f"A permutation can't have {n} elements.", hint=f"0 to {MAX_SAMPLES} will do.")
        self._n = n
        self._keys = _round_keys(n, key)
        low_bits = (n.bit_length() + 1) // 2
        self._low_bits = np.uint64(low_bits)
        self._low_mask = np.uint64((1 << low_bits) - 1)
        self._highs = np.uint64((n >> low_bits) + 1)
        self._table = self._build_table() if n <= TABLE_SIZE else None

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} is outside 0..{self._n - 1}")
        return int(self.block(position, position + 1)[0])

    def block(self, start: int, stop: int, step: int = 1) -> Indices:
        """Return the elements at positions `range(start, stop, step)`, all of which must exist."""
        positions = range(start, stop, step)
        if positions and not (0 <= positions[0] < self._n and 0 <= positions[-1] < self._n):
            raise IndexError(f"positions {positions} are not all inside 0..{self._n - 1}")
        if self._table is not None:
            return self._table[np.arange(start, stop, step)]
        values = np.arange(start, stop, step, dtype=np.int64).view(np.uint64)
        self._encrypt(values)
        while (outside := np.flatnonzero(values >= self._n)).size:
            again = values[outside]
            self._encrypt(again)
            values[outside] = again
        return values.view(np.int64)

    def _build_table(self) -> Indices:
        """Sort by a keyed hash: every order is as likely as any other."""
        words = np.arange(self._n, dtype=np.uint64)
        hashed = np.empty_like(words)
        for key in self._keys[:2]:
            _hash(words, key, hashed, np.empty_like(words))
            words = hashed.copy()
        return np.argsort(hashed, kind="stable").astype(np.int64)

    def _encrypt(self, values: Words) -> None:
        """Permute the domain in place: each round changes one half by a keyed hash of the other half."""
        hashed, scratch = np.empty_like(values), np.empty_like(values)
        low = values & self._low_mask
        high = np.right_shift(values, self._low_bits, out=values)
        for number, key in enumerate(self._keys):
            if number % 2:
                _hash(low, key, hashed, scratch)
                self._add_to_high(high, hashed, scratch)
            else:
                _hash(high, key, hashed, scratch)
                np.bitwise_and(hashed, self._low_mask, out=hashed)
                np.bitwise_xor(low, hashed, out=low)
        np.left_shift(high, self._low_bits, out=high)
        np.bitwise_or(high, low, out=high)

    def _add_to_high(self, high: Words, hashed: Words, scratch: Words) -> None:
        """Add a hash, scaled to the range of the high half, modulo that range."""
        np.multiply(hashed, self._highs, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)
        np.add(high, hashed, out=high)
        # Where there is nothing to subtract the difference wraps round to a huge number.
        np.subtract(high, self._highs, out=scratch)
        np.minimum(high, scratch, out=high)


def _hash(words: Words, key: np.uint64, hashed: Words, scratch: Words) -> None:
    """Write a 32-bit keyed hash of each word to `hashed`: two multiply-and-fold steps."""
    np.add(words, key, out=hashed)
    np.multiply(hashed, _MULTIPLIERS[0], out=hashed)
    np.right_shift(hashed, _HALF, out=scratch)
    np.bitwise_xor(hashed, scratch, out=hashed)
    np.multiply(hashed, _MULTIPLIERS[1], out=hashed)
    np.right_shift(hashed, _HALF, out=hashed)


def _round_keys(n: int, key: tuple[int | str, ...]) -> list[np.uint64]:
    digest = hashlib.shake_128(repr((n, *key)).encode()).digest(8 * ROUNDS)
    return [np.uint64(int.from_bytes(digest[at : at + 8], "big")) for at in range(0, len(digest), 8)]


def shard_range(n: int, rank: int, world_size: int) -> range:
    """Return this rank's share of 0..n-1 for an evaluation: contiguous, no sample twice, none left out."""
    return range(n * rank // world_size, n * (rank + 1) // world_size)


class DistributedOrder(Sampler[int]):
    """Yields this rank's sample indices of one epoch, from any global position on.

    From the position `p` of the last seek, the rank takes the global positions p + rank, p + rank +
    world_size, ...; so the samples of a global batch depend on its positions alone, never on how many
    ranks share it. `batch_size` is what one rank trains per optimizer step (micro-batch times
    accumulation). With `drop_last` the last incomplete global batch of the epoch is left out, so that all
    ranks make equally many steps; without it every sample comes exactly once and the last batch is
    smaller, or missing on some ranks.

    The state to save is (seed, epoch, position), where position counts the samples of all ranks that were
    *trained*: tell it with `advance`, since loader workers fetch samples ahead of that.
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
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"Rank {rank} does not exist among {world_size} ranks.")
        if batch_size < 1:
            raise ConfigError(f"The batch size is {batch_size}.", hint="It must be at least 1.")
        if n < (world_size * batch_size if drop_last else 1):
            raise ConfigError(
                f"The data set has {n} samples; one step of {world_size} ranks with {batch_size} samples "
                f"each needs {world_size * batch_size}.",
                hint="Use a smaller batch, fewer ranks or more data.",
            )
        self.n, self.seed, self.shuffle, self.drop_last = n, seed, shuffle, drop_last
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._epoch = self._start = self._position = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch all ranks together have trained."""
        return self._position

    @property
    def global_batch_size(self) -> int:
        return self._world_size * self._batch_size

    def set_batch_size(self, batch_size: int) -> None:
        """Let one rank train `batch_size` samples per optimizer step from now on."""
        self._batch_size = batch_size

    @property
    def end(self) -> int:
        """The global position at which the iteration since the last seek ends."""
        return self.end_from(self._start)

    def seek(self, epoch: int, position: int) -> None:
        """Make the next iteration begin at a global position of `epoch`."""
        if epoch < 0 or not 0 <= position <= self.n:
            raise ConfigError(f"There is no position {position} in epoch {epoch} of {self.n} samples.")
        self._epoch, self._start, self._position = epoch, position, position

    def advance(self, samples: int) -> None:
        """Count `samples` more as trained by all ranks together, at most to the end of the data."""
        self._position = min(self._position + samples, self.n)

    def __len__(self) -> int:
        """Return how many samples this rank gets from the last seek to the end of the epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        self._position = self._start
        # Chained, since a `yield from` costs as much per index as drawing it.
        return chain.from_iterable(self._blocks(self._positions()))

    def keyed(self) -> Iterator[tuple[int, ...]]:
        """Yield each index with what else its own randomness depends on: the epoch."""
        return zip(self, repeat(self._epoch))

    def _blocks(self, positions: range) -> Iterator[Iterable[int]]:
        draw = self._drawer()
        at, size = 0, _FIRST_BLOCK
        while at < len(positions):
            yield draw(positions[at : at + size])
            at, size = at + size, _BLOCK

    def _drawer(self) -> Callable[[range], Iterable[int]]:
        """Return what gives the samples at some positions of the current epoch."""
        if not self.shuffle:
            return lambda positions: positions
        permutation = Permutation(self.n, self.seed, self._epoch)
        return lambda at: permutation.block(at.start, at.stop, at.step).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return seed, epoch and trained position, with what makes them mean something."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "position": self._position,
            "samples": self.n,
            "shuffle": self.shuffle,
            "global_batch": self.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at any world size; raises MismatchError for other data."""
        for key, here in (("samples", self.n), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != here:
                raise MismatchError(
                    f"The checkpoint's data order has {key}={state[key]!r}, and this run has {here!r}.",
                    hint="Train on the same data with the same settings, or start a run of another name.",
                )
        self.seek(state["epoch"], state["position"])

    def _positions(self) -> range:
        return range(self._start + self._rank, self.end, self._world_size)

    def end_from(self, start: int) -> int:
        """Return the global position at which an iteration from `start` ends."""
        if not self.drop_last:
            return self.n
        return start + (self.n - start) // self.global_batch_size * self.global_batch_size
