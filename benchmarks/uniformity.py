"""Measure how evenly the keyed permutation of the data order mixes, beside NumPy's shuffle.

    python benchmarks/uniformity.py [--keys 200] [--output FILE]

Five tests examine a whole permutation for each size and each of --keys keys. Three are chi-squares over a
table of cells: where elements go (position by element), and which elements follow each other, at a distance
of 1 and of 64 positions. Two are counts with mean 1: elements that stay in place, and neighbours that stay
neighbours. Two more chi-squares examine the first two elements over many keys.

All results are turned into standard scores: a perfect shuffle gives scores with mean 0 and deviation 1. Means
are shown in standard errors. NumPy's shuffle passes through the same tests as a control. The keys are fixed,
so the figures are the same each time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import keep, parser

from slurmddp.training.data.permutation import Permutation

SIZES = (1_000, 5_000, 65_537, 1_000_000)
FAR = 64
KEYS_PER_SIZE = 50
"""The first elements are collected over this number times --keys keys."""
LIMIT = 4.0

Order = NDArray[np.int64]
Shuffle = Callable[[int, int], Order]
"""Returns a permutation of so many elements for a key."""


def keyed(n: int, key: int) -> Order:
    """Return slurmddp's permutation."""
    return Permutation(n, key, 0).block(0, n)


def shuffled_by_numpy(n: int, key: int) -> Order:
    """Return NumPy's permutation."""
    return np.random.default_rng(key).permutation(n).astype(np.int64)


def cells(values: Order, n: int, count: int) -> Order:
    """Return the cell of each value below `n`, of so many cells."""
    return values * count // n


def score(first: Order, second: Order, n: int) -> float:
    """Return the standard score of the chi-square of pairs over a square of cells."""
    side = int(min(64, max(4, math.sqrt(len(first) / 20))))
    table = np.bincount(cells(first, n, side) * side + cells(second, n, side), minlength=side * side)
    observed = table.reshape(side, side)
    expected = np.outer(observed.sum(1), observed.sum(0)) / observed.sum()

    # The margins of a permutation are fixed, which makes the statistic larger by n / (n - 1).
    chi_square = float(((observed - expected) ** 2 / expected).sum()) * (len(first) - 1) / len(first)
    freedom = (side - 1) ** 2
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def poisson_score(total: int, keys: int) -> float:
    """Return the standard score of a sum of `keys` counts of mean 1."""
    return (total - keys) / math.sqrt(keys)


def examine(shuffle: Shuffle, n: int, keys: int) -> dict[str, Any]:
    """Return the scores of the five tests of whole permutations."""
    places = []
    neighbours = []
    far_neighbours = []
    stayed = 0
    stayed_neighbours = 0
    for key in range(keys):
        order = shuffle(n, key)
        places.append(score(np.arange(n), order, n))
        neighbours.append(score(order[:-1], order[1:], n))
        far_neighbours.append(score(order[:-FAR], order[FAR:], n))
        stayed += int((order == np.arange(n)).sum())
        stayed_neighbours += int((np.diff(order) == 1).sum())

    return {
        "position and element": spread(places),
        "element and next": spread(neighbours),
        f"element and {FAR}th next": spread(far_neighbours),
        "stayed in place": poisson_score(stayed, keys),
        "stayed neighbours": poisson_score(stayed_neighbours, keys),
    }


def spread(scores: list[float]) -> dict[str, float]:
    """Return the mean (in standard errors), the deviation and the largest of many scores."""
    values = np.array(scores)
    return {
        "mean": float(values.mean() * math.sqrt(len(values))),
        "deviation": float(values.std(ddof=1)),
        "largest": float(np.abs(values).max()),
    }


def examine_first_elements(n: int, keys: int) -> dict[str, float]:
    """Return the scores of the first element, and of the first two together, over many keys."""
    heads = np.array([Permutation(n, 10_000 + key, 0).block(0, 2) for key in range(keys)])
    observed = np.bincount(cells(heads[:, 0], n, 100), minlength=100)
    expected = keys / 100
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return {
        "first element": (chi_square - 99) / math.sqrt(2 * 99),
        "first and second": score(heads[:, 0], heads[:, 1], n),
    }


def mean_of(result: float | dict[str, float]) -> float:
    """Return the mean of a test with many scores, or the score of another test."""
    if isinstance(result, dict):
        return result["mean"]
    return result


def show(name: str, n: int, results: dict[str, Any]) -> None:
    """Print a line for each test."""
    for test, result in results.items():
        text = f"{mean_of(result):>8.2f}"
        if isinstance(result, dict):
            text += f"{result['deviation']:>11.2f}{result['largest']:>9.2f}"
        print(f"{n:>9,}  {name:<6}{test:<24}{text}")


def main() -> int:
    """Examine all sizes, print the scores, and return 1 if the largest mean exceeds the limit."""
    options = parser(__doc__)
    options.add_argument("--keys", type=int, default=200, help="permutations per size (default: 200)")
    arguments = options.parse_args()

    keys = arguments.keys
    print(f"{'samples':>9}  {'':<6}{'standard score of':<24}{'mean':>8}{'deviation':>11}{'largest':>9}")
    sizes = {}
    worst = 0.0
    for n in SIZES:
        ours = examine(keyed, n, keys) | examine_first_elements(n, KEYS_PER_SIZE * keys)
        control = examine(shuffled_by_numpy, n, keys)
        show("ours", n, ours)
        show("numpy", n, control)
        sizes[str(n)] = {"ours": ours, "numpy": control}
        worst = max(worst, *(abs(mean_of(result)) for result in ours.values()))

    is_held = worst < LIMIT
    print(f"\nlargest mean of ours {worst:.2f} (at most {LIMIT:g})")
    results = {"keys": keys, "numpy": metadata.version("numpy"), "sizes": sizes}
    keep(arguments.output, {**results, "worst_mean": worst, "held": is_held})
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
