"""Measure the time to the first index of an epoch and to further ones, beside torch's DistributedSampler.

    python benchmarks/data_order.py [--rounds 5] [--most 8] [--output FILE]

Every measurement is a process of its own that has imported torch and the sampler before the clock starts. It
is rank 5 of 64 of a shuffled epoch. The variants take turns; sizes go up to 10^--most for torch (at 10^8 it
needs 4.5 GiB and is measured once) and to 10^9 for `RankSampler`. Printed are medians: the time from
building the sampler to its first index, growth of the process's peak memory until then, and the CPU time per
index for the next ones, at most a million of this rank's part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from record import keep, parser

RANK, WORLD_SIZE = 5, 64
AFTERWARDS = 1_000_000
LARGEST = 10**9
LIMIT_S, LIMIT_MIB = 1e-3, 1.0


class Length:
    """All that a sampler wants of a data set."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n


def build(variant: str, n: int) -> Any:
    if variant == "torch":
        from torch.utils.data import DistributedSampler

        return lambda: DistributedSampler(Length(n), WORLD_SIZE, RANK, shuffle=True)  # type: ignore[arg-type]
    from slurmddp.training.data.sampler import RankSampler

    return lambda: RankSampler(n, rank=RANK, world_size=WORLD_SIZE, seed=1)


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def one(variant: str, n: int) -> dict[str, float]:
    """Measure in this process."""
    make = build(variant, n)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_kib("VmRSS")
    started, started_cpu = time.perf_counter(), time.process_time()
    indices = iter(make())
    next(indices)
    first_s, first_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    grown_mib = (memory_kib("VmHWM") - before) / 1024
    # A small data set leaves this rank few indices: it is gone through as often as needed.
    count, spent_s = 0, 0.0
    while count < AFTERWARDS and spent_s < 5:
        count_here = min(AFTERWARDS, n // WORLD_SIZE - 2)
        started = time.process_time()  # a busy machine takes the processor away, but not what it has done
        deque(islice(indices, count_here), maxlen=0)
        spent_s += time.process_time() - started
        count += count_here
        if count < AFTERWARDS:
            indices = iter(make())
            next(indices)
    return {
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "grown_mib": grown_mib,
        "then_ns": 1e9 * spent_s / count,
    }


def fresh(variant: str, n: int) -> dict[str, float]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--one", variant, str(n)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


def measure(rounds: int, most: int) -> dict[tuple[str, int], list[dict[str, float]]]:
    sizes = [("ours", LARGEST), *((v, 10**power) for power in range(6, most + 1) for v in ("ours", "torch"))]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        for variant, n in sizes:
            if variant == "torch" and n >= 10**8 and number:
                continue
            found.setdefault((variant, n), []).append(fresh(variant, n))
    return found


def report(found: dict[tuple[str, int], list[dict[str, float]]]) -> dict[str, Any]:
    rows = []
    print(
        f"{'sampler':<8}{'samples':>12}{'first index':>15}{'its CPU time':>15}{'memory':>13}"
        f"{'then, per index':>18}{'runs':>6}"
    )
    for (variant, n), runs in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(
            f"{variant:<8}{n:>12.0e}{1000 * median['first_s']:>12.3f} ms"
            f"{1000 * median['first_cpu_s']:>12.3f} ms{median['grown_mib']:>9.2f} MiB"
            f"{median['then_ns']:>15.0f} ns{len(runs):>6}"
        )
        rows.append({"sampler": variant, "samples": n, "median": median, "runs": runs})
    largest = next(row for row in rows if (row["sampler"], row["samples"]) == ("ours", LARGEST))["median"]
    held = largest["first_s"] < LIMIT_S and largest["grown_mib"] < LIMIT_MIB
    print(f"\nat 10^9 under {1000 * LIMIT_S:g} ms and {LIMIT_MIB:g} MiB: {'yes' if held else 'no'}")
    return {
        "rank": RANK,
        "world_size": WORLD_SIZE,
        "rows": rows,
        "held": held,
    }


def main() -> int:
    made = parser(__doc__, rounds=5)
    made.add_argument("--most", type=int, default=8, help="largest power of ten for torch (default: 8)")
    made.add_argument("--one", nargs=2, metavar=("SAMPLER", "SAMPLES"), help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], int(options.one[1]))))
        return 0
    result = report(measure(options.rounds, options.most))
    keep(options.output, result)
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
