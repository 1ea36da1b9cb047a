"""Fit the constants of a machine to measured times, and measure how well they predict other times; pure."""

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
    """The measured time of some work.

    Nearly every algorithm sends two bytes for each byte that it adds. So times of all-reduces alone hardly
    separate the costs of sending and of adding. Times of additions without messages do (`addition`).
    """

    work: Work
    bytes: int
    """Size of the tensor."""
    seconds: float

    @classmethod
    def all_reduce(cls, algorithm: str, ranks: int, size: int, seconds: float) -> Measurement:
        """Return the measurement of an algorithm of `WORK` on `ranks` ranks for `size` bytes."""
        return cls(work=WORK[algorithm](ranks, size), bytes=size, seconds=seconds)

    @classmethod
    def addition(cls, size: int, seconds: float) -> Measurement:
        """Return the measurement of adding `size` bytes to others on one rank."""
        return cls(work=Work(messages=0, sent=0, added=size), bytes=size, seconds=seconds)


def fit(measured: Sequence[Measurement]) -> ClusterCosts:
    """Return the constants that predict the measured times with the least squares of relative errors.

    No constant is negative: of all subsets of the constants, the best fit without a negative value is taken.

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
            f"Three constants can't be fitted to {len(measured)} measurement(s).", hint="Measure more sizes."
        )

    # Divided by the measured time, the errors of the equations `row @ constants = 1` are relative errors.
    work = [(item.work.messages, item.work.sent, item.work.added) for item in measured]
    rows = np.array(work, dtype=float) / np.array([[item.seconds] for item in measured])
    # Latencies and bytes differ by many orders of magnitude.
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
    """Yield each subset of the columns of three constants, without the empty subset."""
    for count in (1, 2, 3):
        for columns in itertools.combinations(range(3), count):
            yield list(columns)


def held_out_sizes(sizes: Iterable[int]) -> frozenset[int]:
    """Return every third size, but never the smallest or the largest; the fit leaves these sizes out."""
    ordered = sorted(set(sizes))
    return frozenset(ordered[1:-1:3])


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Constants that were fitted to a part of the sizes, and their errors on the other part."""

    costs: ClusterCosts
    held_out: tuple[int, ...]
    """The sizes, in bytes, that the fit has left out."""
    median_error: float
    """Median relative error of all-reduces of these sizes."""
    largest_error: float


def validate(measured: Sequence[Measurement]) -> Validation:
    """Fit to two thirds of the sizes, and predict the all-reduces of the other sizes.

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
