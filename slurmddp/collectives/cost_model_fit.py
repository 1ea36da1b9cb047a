"""Fit the constants of a machine to measured times, and tell how well they predict other times; pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurmddp.collectives.cost_model import WORK, Machine, Work
from slurmddp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured time and the work that took it.

    Nearly every algorithm sends two bytes for each byte that it adds. So times of all-reduces alone hardly
    tell sending from adding; the times of additions without messages do (`addition`).
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


def fit(measured: Sequence[Measurement]) -> Machine:
    """Return the constants that predict the measured times with the least squares of relative errors.

    No constant is negative: of all subsets of the constants, the best fit without a negative value is taken.

    Args:
        measured: all-reduces of one cluster, of any algorithms, sizes and numbers of ranks above 1, and
            additions of one rank.

    Raises:
        ConfigError: there are fewer than three measurements.

    Source:
        Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23: the subsets are few enough here
        to try them all.
    """
    if len(measured) < 3:
        raise ConfigError(
            f"Three constants can't be fitted to {len(measured)} measurement(s).", hint="Measure more sizes."
        )
    work = [(one.work.messages, one.work.sent, one.work.added) for one in measured]
    rows = np.array(work, dtype=float) / np.array([[one.seconds] for one in measured])
    scale = np.where(rows.any(axis=0), np.abs(rows).max(axis=0), 1.0)
    best, least = np.zeros(3), np.inf
    for columns in (list(some) for count in (1, 2, 3) for some in itertools.combinations(range(3), count)):
        found = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)[0]
        error = float(np.square(rows[:, columns] / scale[columns] @ found - 1).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[columns] = found / scale[columns]
    alpha, beta, gamma = map(float, best)
    return Machine(alpha_s=alpha, beta_s=beta, gamma_s=gamma)


def held_out_sizes(sizes: Iterable[int]) -> frozenset[int]:
    """Return every third size, but never the smallest or the largest; the fit leaves these sizes out."""
    ordered = sorted(set(sizes))
    return frozenset(ordered[1:-1:3])


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Constants that were fitted to a part of the sizes, and their error on the other part."""

    machine: Machine
    held_out: tuple[int, ...]
    """The sizes in bytes that the fit has not seen."""
    median_error: float
    """Median relative error of all-reduces of these sizes."""
    largest_error: float


def validate(measured: Sequence[Measurement]) -> Validation:
    """Fit to two thirds of the sizes, and predict the all-reduces of the others.

    Raises:
        ConfigError: there are fewer than three sizes.
    """
    held = held_out_sizes(one.bytes for one in measured)
    if not held:
        raise ConfigError("The cost model needs times of three sizes or more.", hint="Give more --sizes.")
    machine = fit([one for one in measured if one.bytes not in held])
    unseen = [one for one in measured if one.bytes in held and one.work.messages]
    errors = [abs(one.work.seconds(machine) / one.seconds - 1) for one in unseen]
    return Validation(
        machine=machine,
        held_out=tuple(sorted(held)),
        median_error=statistics.median(errors),
        largest_error=max(errors),
    )
