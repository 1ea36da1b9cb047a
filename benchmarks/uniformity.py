"""Measure how evenly the keyed permutation of the data order mixes, beside NumPy's shuffle.

    python benchmarks/uniformity.py [--keys 200] [--output FILE]

For each size and each of --keys keys, whole permutations are put to five tests. Three are chi-squares over a
table of cells: where elements go (position by element), and which elements follow each other, at a distance
of 1 and of 64 positions. Two are counts with mean 1: elements that stay in place, and neighbours that stay
neighbours. The first two elements over many keys are tested as well. All are turned into standard scores: a
perfect shuffle gives scores with mean 0 and deviation 1. Means are shown in standard errors. NumPy's shuffle
goes through the same tests as a control. Keys are fixed, so the figures come out the same each time.
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
"""First elements are collected over that many times --keys."""
LIMIT = 4.0

Order = NDArray[np.int64]
Shuffle = Callable[[int, int], Order]


def ours(n: int, key: int) -> Order:
    return Permutation(n, key, 0).block(0, n)


def numpys(n: int, key: int) -> Order:
    return np.random.default_rng(key).permutation(n).astype(np.int64)


def cells(values: Order, n: int, count: int) -> Order:
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
    places, next_ones, far_ones, stayed, neighbours = [], [], [], 0, 0
    for key in range(keys):
        order = shuffle(n, key)
        places.append(score(np.arange(n), order, n))
        next_ones.append(score(order[:-1], order[1:], n))
        far_ones.append(score(order[:-FAR], order[FAR:], n))
        stayed += int((order == np.arange(n)).sum())
        neighbours += int((np.diff(order) == 1).sum())
    return {
        "position and element": spread(places),
        "element and next": spread(next_ones),
        f"element and {FAR}th next": spread(far_ones),
        "stayed in place": poisson_score(stayed, keys),
        "stayed neighbours": poisson_score(neighbours, keys),
    }


def spread(scores: list[float]) -> dict[str, float]:
    """Return mean (in standard errors), deviation and the largest of many scores."""
    values = np.array(scores)
    return {
        "mean": float(values.mean() * math.sqrt(len(values))),
        "deviation": float(values.std(ddof=1)),
        "largest": float(np.abs(values).max()),
    }


def heads(n: int, keys: int) -> dict[str, float]:
    """Return the scores of the first element, and of the first two together, over many keys."""
    found = np.array([Permutation(n, 10_000 + key, 0).block(0, 2) for key in range(keys)])
    count = np.bincount(cells(found[:, 0], n, 100), minlength=100)
    expected = keys / 100
    chi_square = float(((count - expected) ** 2 / expected).sum())
    return {
        "first element": (chi_square - 99) / math.sqrt(2 * 99),
        "first and second": score(found[:, 0], found[:, 1], n),
    }


def show(name: str, n: int, found: dict[str, Any]) -> None:
    for what, value in found.items():
        if isinstance(value, dict):
            text = f"{value['mean']:>8.2f}{value['deviation']:>11.2f}{value['largest']:>9.2f}"
        else:
            text = f"{value:>8.2f}"
        print(f"{n:>9,}  {name:<6}{what:<24}{text}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--keys", type=int, default=200, help="permutations per size (default: 200)")
    asked = options.parse_args()
    keys = asked.keys
    print(f"{'samples':>9}  {'':<6}{'standard score of':<24}{'mean':>8}{'deviation':>11}{'largest':>9}")
    results: dict[str, Any] = {"keys": keys, "numpy": metadata.version("numpy"), "sizes": {}}
    worst = 0.0
    for n in SIZES:
        mine = examine(ours, n, keys) | heads(n, KEYS_PER_SIZE * keys)
        control = examine(numpys, n, keys)
        show("ours", n, mine)
        show("numpy", n, control)
        results["sizes"][str(n)] = {"ours": mine, "numpy": control}
        worst = max(worst, *(abs(v["mean"] if isinstance(v, dict) else v) for v in mine.values()))
    results |= {"worst_mean": worst, "held": worst < LIMIT}
    print(f"\nlargest mean of ours {worst:.2f} (at most {LIMIT:g})")
    keep(asked.output, results)
    return 0 if results["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
