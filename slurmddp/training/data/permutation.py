"""Compute a keyed permutation of 0..n-1 position by position, in constant memory.

A Feistel network permutes a domain a little larger than `n`. A value of `n` or more is encrypted again until
it falls below `n` ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Any
position costs the same. `torch.utils.data.DistributedSampler` draws a whole permutation on every rank
instead: at 10^8 samples that takes seconds and gigabytes, and reading can't resume in the middle.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from slurmddp.errors import ConfigError

ROUNDS = 6
"""Luby and Rackoff need 4 rounds with ideal round functions ("How to construct pseudorandom permutations from
pseudorandom functions", 1988). These round functions are only simple mixers, so the network has two more
rounds."""

MAX_SAMPLES = 1 << 48

TABLE_SIZE = 1 << 12
"""Up to this size the permutation is a table: a Feistel network of a few bits is visibly uneven."""

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""The multipliers of Stafford's Mix13 (2011), which SplitMix64 uses too."""
_HALF = np.uint64(32)

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]


class Permutation:
    """A pseudorandom permutation of 0..n-1, a function of `n` and `key`.

    It takes O(1) memory, and O(1) time for the element at any position.

    Args:
        n: the number of elements, 0 to 2^48.
        key: integers and strings, for example seed and epoch.

    Raises:
        ConfigError: `n` is out of range.

    Example:
        >>> Permutation(10, 1, 2).block(0, 4).tolist()
        [8, 7, 9, 6]
    """

    def __init__(self, n: int, *key: int | str) -> None:
        if not 0 <= n <= MAX_SAMPLES:
            raise ConfigError(f"A permutation can't have {n} elements.", hint=f"Give 0 to {MAX_SAMPLES}.")

        self._n = n
        self._keys = _round_keys(n, key)

        low_bits = (n.bit_length() + 1) // 2
        self._low_bits = np.uint64(low_bits)
        self._low_mask = np.uint64((1 << low_bits) - 1)
        self._highs = np.uint64((n >> low_bits) + 1)
        """The number of values that the high half of a position can have in the Feistel network."""

        self._table = self._build_table() if n <= TABLE_SIZE else None

    def block(self, start: int, stop: int, step: int = 1) -> Indices:
        """Return an int64 array of the elements at the positions in `range(start, stop, step)`.

        Raises:
            IndexError: a position is outside 0..n-1.
        """
        positions = range(start, stop, step)
        if positions and not (0 <= positions[0] < self._n and 0 <= positions[-1] < self._n):
            raise IndexError(f"positions {positions} are not all inside 0..{self._n - 1}")
        if self._table is not None:
            return self._table[np.arange(start, stop, step)]

        values = np.arange(start, stop, step, dtype=np.int64).view(np.uint64)
        self._encrypt(values)
        while (outside := np.flatnonzero(values >= self._n)).size:
            cycled = values[outside]
            self._encrypt(cycled)
            values[outside] = cycled

        return values.view(np.int64)

    def _build_table(self) -> Indices:
        """Return all elements, sorted by a keyed hash of each."""
        values = np.arange(self._n, dtype=np.uint64)
        hashed = np.empty_like(values)
        for key in self._keys[:2]:
            _hash(values, key, hashed, np.empty_like(values))
            values = hashed.copy()

        return np.argsort(hashed, kind="stable").astype(np.int64)

    def _encrypt(self, values: Words) -> None:
        """Replace each value by its image under the Feistel network, in place.

        Each round changes one half of the bits by a keyed hash of the other half.
        """
        hashed = np.empty_like(values)
        scratch = np.empty_like(values)
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
        """Add hashes to `high` in place, modulo `self._highs`; they are scaled to this range first."""
        np.multiply(hashed, self._highs, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)
        np.add(high, hashed, out=high)
        # Subtract the modulus where necessary: if a sum is already below it, the unsigned difference wraps
        # around to a huge number, and the minimum is the sum itself.
        np.subtract(high, self._highs, out=scratch)
        np.minimum(high, scratch, out=high)


def _hash(values: Words, key: np.uint64, hashed: Words, scratch: Words) -> None:
    """Write a 32-bit keyed hash of each value to `hashed`, by multiplying and folding twice.

    `scratch` is overwritten.
    """
    np.add(values, key, out=hashed)
    np.multiply(hashed, _MULTIPLIERS[0], out=hashed)
    np.right_shift(hashed, _HALF, out=scratch)
    np.bitwise_xor(hashed, scratch, out=hashed)
    np.multiply(hashed, _MULTIPLIERS[1], out=hashed)
    np.right_shift(hashed, _HALF, out=hashed)


def _round_keys(n: int, key: tuple[int | str, ...]) -> list[np.uint64]:
    digest = hashlib.shake_128(repr((n, *key)).encode()).digest(8 * ROUNDS)
    return [np.uint64(int.from_bytes(digest[i : i + 8], "big")) for i in range(0, len(digest), 8)]
