"""Add up one tensor by every all-reduce algorithm, count messages and bytes, and compare the sums.

python side_by_side.py --ranks 4 --elements 250000
"""

import argparse
import time

import torch

from slurmddp import Distributon
from slurmddp.collectives import ALGORITHMS, CountedLink, GroupLink, all_reduce


def compare(d: Distributon, elements: int) -> None:
    """Print a row for each algorithm, with the counts of the busiest rank and the time of the slowest."""
    source = torch.full((elements,), d.rank + 1.0)
    expected = d.all_reduce(source, "sum")

    d.print(f"{'algorithm':<18}{'messages':>9}{'bytes sent':>12}{'time':>11}  sum")
    for name in ALGORITHMS:
        link = CountedLink(GroupLink())
        d.barrier()
        began = time.perf_counter()
        total = all_reduce(source, link, algorithm=name)
        seconds = torch.tensor(time.perf_counter() - began)

        counts = torch.tensor([link.messages, link.bytes])
        messages, sent = d.all_reduce(counts, "max").tolist()
        slowest = d.all_reduce(seconds, "max").item()
        comparison = "equal" if torch.equal(total, expected) else "different"
        d.print(f"{name:<18}{messages:>9}{sent:>12}{1e3 * slowest:>8.2f} ms  {comparison}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=250_000)
    options = parser.parse_args()
    Distributon(options.ranks).launch(compare, options.elements)


if __name__ == "__main__":
    main()
