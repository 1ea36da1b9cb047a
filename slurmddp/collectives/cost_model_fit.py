"""Fit the cost model to measured times, and compute how well it predicts other times, by pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurmddp.collectives.cost_model import WORK, ClusterCosts, Work
from slurmddp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured time of an all-reduce or of a local addition, with its work in the cost model.

    Nearly every algorithm sends two bytes for each byte that it adds. So times of all-reduces alone hardly
    separate the costs of sending and of adding. Times of additions without messages do (`addition`).
    """

    work: Work
    bytes: int
    """Size of the tensor in bytes."""
    seconds: float

    @classmethod
    def all_reduce(cls, algorithm: str, ranks: int, size: int, seconds: float) -> Measurement:
        """Return the measurement of an all-reduce of `size` bytes on `ranks` ranks.

        Args:
            algorithm: a key of `WORK`.
            ranks: the number of ranks.
            size: bytes of the tensor.
            seconds: the measured time.
        """
        return cls(work=WORK[algorithm](ranks, size), bytes=size, seconds=seconds)

    @classmethod
    def addition(cls, size: int, seconds: float) -> Measurement:
        """Return the measurement of the addition of two tensors of `size` bytes on one rank."""
        return cls(work=Work(messages=0, sent=0, added=size), bytes=size, seconds=seconds)


def fit(measured: Sequence[Measurement]) -> ClusterCosts:
    """Return the constants with the least sum of squared relative errors of the predicted times.

    No constant is negative: each subset of the constants is fitted while the others are zero, and the best
    fit without a negative value is returned.

    Args:
        measured: all-reduces of one cluster, with any algorithms, sizes and numbers of ranks above 1, and
            additions of one rank.

    Raises:
        ConfigError: there are fewer than three measurements.

    Source:
        Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23. Three constants have so few
        subsets that all of them are tried.
    """
    if len(measured) < 3:
        raise ConfigError(
            f"Three constants can't be fitted to fewer than three measurements ({len(measured)}).",
            hint="Measure more sizes.",
        )

    # Each row is divided by the measured time: the errors of the equations `row @ constants = 1` are then
    # relative errors.
    work = [(item.work.messages, item.work.sent, item.work.added) for item in measured]
    rows = np.array(work, dtype=float) / np.array([[item.seconds] for item in measured])
    # The columns are scaled for numerical accuracy: numbers of messages and of bytes differ by orders of
    # magnitude.
    scale = np.where(rows.any(axis=0), np.abs(rows).max(axis=0), 1.0)

    constants = np.zeros(3)
    smallest_error = np.inf
    for columns in _subsets():
        matrix = rows[:, columns] / scale[columns]
        solution = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0]
        error = float(np.square(matrix @ solution - 1).sum())
        if (solution >= 0).all() and error < smallest_error:
            smallest_error = error
            constants = np.zeros(3)
            constants[columns] = solution / scale[columns]

    alpha, beta, gamma = map(float, constants)
    return ClusterCosts(alpha_s=alpha, beta_s=beta, gamma_s=gamma)


def _subsets() -> Iterator[list[int]]:
    """Yield each nonempty subset of the column indices 0, 1 and 2."""
    for count in (1, 2, 3):
        for columns in itertools.combinations(range(3), count):
            yield list(columns)


def held_out_sizes(sizes: Iterable[int]) -> frozenset[int]:
    """Return the sizes to hold out of the fit: every third, but neither the smallest nor the largest."""
    ordered = sorted(set(sizes))
    return frozenset(ordered[1:-1:3])


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Constants that were fitted without the held-out sizes, and their prediction errors on these sizes."""

    costs: ClusterCosts
    held_out: tuple[int, ...]
    """The sizes, in bytes, that the fit has left out."""
    median_error: float
    """Median relative error of the predicted times of all-reduces of the held-out sizes."""
    largest_error: float


def validate(measured: Sequence[Measurement]) -> Validation:
    """Fit the constants without the held-out sizes, and return their errors on all-reduces of these sizes.

    Raises:
        ConfigError: there are fewer than three sizes.
    """
    held_out = held_out_sizes(item.bytes for item in measured)
    if not held_out:
        raise ConfigError("The cost model needs times of three sizes or more.", hint="Give more --sizes.")

    costs = fit([item for item in measured if item.bytes not in held_out])
    unseen = [item for item in measured if item.bytes in held_out and item.work.messages]
    errors = [abs(item.work.seconds(costs) / item.seconds - 1) for item in unseen]

    return Validation(
        costs=costs,
        held_out=tuple(sorted(held_out)),
        median_error=statistics.median(errors),
        largest_error=max(errors),
    )
