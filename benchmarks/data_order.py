"""Measure the time to the first index of an epoch and to further ones, beside torch's DistributedSampler.

    python benchmarks/data_order.py [--rounds 5] [--most 8] [--output FILE]

Each measurement is a process of its own, which has imported torch and the sampler before the clock starts.
The sampler belongs to rank 5 of 64 and shuffles the epoch. The variants take turns. Sizes go up to 10^9 for
`RankSampler`, and up to 10^--most for torch, which needs 4.5 GiB at 10^8 and is measured there only once.

Printed are medians: the time from building the sampler to its first index, the growth of the process's peak
memory until then, and the CPU time of each index after that, over a million indices of this rank's part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from record import keep, parser

RANK = 5
WORLD_SIZE = 64
FURTHER_INDICES = 1_000_000
LARGEST = 10**9
LIMIT_S = 1e-3
LIMIT_MIB = 1.0
Figures = dict[str, float]


class Length:
    """The only part of a data set that a sampler asks for."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples


def sampler_builder(variant: str, samples: int) -> Callable[[], Iterable[int]]:
    """Return a function that builds a sampler; its module is imported now."""
    if variant == "torch":
        from torch.utils.data import DistributedSampler

        data: Any = Length(samples)
        return lambda: DistributedSampler(data, WORLD_SIZE, RANK, shuffle=True)

    from slurmddp.training.data.sampler import RankSampler

    return lambda: RankSampler(samples, rank=RANK, world_size=WORLD_SIZE, seed=1)


def memory_kib(name: str) -> int:
    """Return a figure of this process's memory, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def further_index_s(build: Callable[[], Iterable[int]], indices: Iterable[int], samples: int) -> float:
    """Return the CPU seconds of an index after the first.

    A small data set leaves this rank few indices, so its epoch is repeated until there are enough, or until
    five seconds are spent.
    """
    per_epoch = min(FURTHER_INDICES, samples // WORLD_SIZE - 2)
    iterator = iter(indices)
    count = 0
    spent_s = 0.0
    while count < FURTHER_INDICES and spent_s < 5:
        # CPU time, because other programs make a process wait but don't change its work.
        started = time.process_time()
        deque(islice(iterator, per_epoch), maxlen=0)
        spent_s += time.process_time() - started
        count += per_epoch

        if count < FURTHER_INDICES:
            iterator = iter(build())
            next(iterator)
    return spent_s / count


def measure_here(variant: str, samples: int) -> Figures:
    """Measure a sampler in this process."""
    build = sampler_builder(variant, samples)
    # Writing 5 resets the peak memory of this process (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before_kib = memory_kib("VmRSS")

    started = time.perf_counter()
    cpu_started = time.process_time()
    indices = iter(build())
    next(indices)
    first_s = time.perf_counter() - started
    first_cpu_s = time.process_time() - cpu_started
    grown_mib = (memory_kib("VmHWM") - before_kib) / 1024

    return {
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "grown_mib": grown_mib,
        "then_ns": 1e9 * further_index_s(build, indices, samples),
    }


def measure_in_process(variant: str, samples: int) -> Figures:
    """Measure a sampler in a new process."""
    command = [sys.executable, __file__, "--one", variant, str(samples)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: Figures = json.loads(output)
    return figures


def measure(rounds: int, most: int) -> dict[tuple[str, int], list[Figures]]:
    """Return the figures of each variant and size, one for each round.

    Args:
        rounds: the number of rounds.
        most: the largest power of ten for torch's sampler.
    """
    cases = [("ours", LARGEST)]
    for power in range(6, most + 1):
        cases += [("ours", 10**power), ("torch", 10**power)]

    figures: dict[tuple[str, int], list[Figures]] = {}
    for number in range(rounds):
        for variant, samples in cases:
            is_slow = variant == "torch" and samples >= 10**8
            if is_slow and number > 0:
                continue
            figures.setdefault((variant, samples), []).append(measure_in_process(variant, samples))
    return figures


def report(figures: dict[tuple[str, int], list[Figures]]) -> dict[str, Any]:
    """Print the medians, compare the largest size with the limits, and return the results for a file."""
    print(
        f"{'sampler':<8}{'samples':>12}{'first index':>15}{'its CPU time':>15}{'memory':>13}"
        f"{'then, per index':>18}{'runs':>6}"
    )
    medians = {}
    rows = []
    for case in sorted(figures, key=lambda case: (case[1], case[0])):
        variant, samples = case
        runs = figures[case]
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        medians[case] = median
        rows.append({"sampler": variant, "samples": samples, "median": median, "runs": runs})
        print(
            f"{variant:<8}{samples:>12.0e}{1000 * median['first_s']:>12.3f} ms"
            f"{1000 * median['first_cpu_s']:>12.3f} ms{median['grown_mib']:>9.2f} MiB"
            f"{median['then_ns']:>15.0f} ns{len(runs):>6}"
        )

    largest = medians["ours", LARGEST]
    is_held = largest["first_s"] < LIMIT_S and largest["grown_mib"] < LIMIT_MIB
    answer = "yes" if is_held else "no"
    print(f"\nat 10^9 under {1000 * LIMIT_S:g} ms and {LIMIT_MIB:g} MiB: {answer}")
    return {"rank": RANK, "world_size": WORLD_SIZE, "rows": rows, "held": is_held}


def main() -> int:
    """Measure, print the medians, and return 1 if a limit is exceeded."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--most", type=int, default=8, help="largest power of ten for torch (default: 8)")
    options.add_argument("--one", nargs=2, metavar=("SAMPLER", "SAMPLES"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        variant, samples = arguments.one
        print(json.dumps(measure_here(variant, int(samples))))
        return 0

    results = report(measure(arguments.rounds, arguments.most))
    keep(arguments.output, results)
    return 0 if results["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
