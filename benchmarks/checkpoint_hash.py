"""Measures what it costs that each checkpoint is hashed while it is written: the share of the time of a save.

    python benchmarks/checkpoint_hash.py [--rounds N] [--dir FOLDER]

Saves of one state take turns: as they are, and with a digest that does nothing. The share is the median over
the rounds of (with - without) / with, for states of 100 MB and 600 MB; less than 5 % is promised. `fsync` is
part of a save; the disk is what `--dir` stands on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slurmddp import checkpoint
from slurmddp.runs import durable

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "checkpoint_hash.json"
SIZES_MB = (100, 600)
LIMIT = 0.05


class NoDigest:
    """Stands in for the digest and looks at nothing."""

    def update(self, data: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


@contextmanager
def hashing(wanted: bool) -> Iterator[None]:
    real = durable.Digest
    durable.Digest = real if wanted else NoDigest
    try:
        yield
    finally:
        durable.Digest = real


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Return a state of a hundred tensors, as a model and its optimizer would have."""
    return {f"w{number}": torch.randn(megabytes * 10_000 // 4) for number in range(100)}


def save_s(root: Path, state: dict[str, torch.Tensor], hashed: bool) -> float:
    shutil.rmtree(root, ignore_errors=True)
    os.sync()  # so that no save pays for what another has left in the page cache
    with hashing(hashed):
        started = time.perf_counter()
        checkpoint.write(root, 1, state, meta={})
        return time.perf_counter() - started


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, object]:
    state, root = state_of(megabytes), folder / "checkpoints"
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        taken = {hashed: save_s(root, state, hashed) for hashed in order}
        if number:  # the first round fills caches
            for hashed in times:
                times[hashed].append(taken[hashed])
    shares = [1 - without / hashed for hashed, without in zip(times[True], times[False], strict=True)]
    data = bytes(megabytes * 1_000_000)
    started = time.thread_time()
    durable.Digest().update(data)
    alone_s = time.thread_time() - started
    started = time.thread_time()
    hashlib.sha256(data).hexdigest()
    sha256_s = time.thread_time() - started
    return {
        "megabytes": megabytes,
        "save_s": round(statistics.median(times[True]), 4),
        "save_without_hash_s": round(statistics.median(times[False]), 4),
        "hash_cpu_s": round(alone_s, 4),
        "sha256_cpu_s": round(sha256_s, 4),
        "share": round(statistics.median(shares), 4),
        "shares": [round(share, 4) for share in shares],
        "saves_s": [round(value, 4) for value in times[True]],
        "saves_without_hash_s": [round(value, 4) for value in times[False]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="pairs of saves for each size (default: 15)")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure (default: this one)")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.dir or RESULTS.parents[1]) as folder:
        found = [measure(size, options.rounds, Path(folder)) for size in SIZES_MB]
    print(f"{'state':>8}{'save':>10}{'no hash':>10}{'hash, CPU':>12}{'share':>8}")
    for one in found:
        print(
            f"{one['megabytes']:>5} MB{one['save_s']:>8.2f} s{one['save_without_hash_s']:>8.2f} s"
            f"{one['hash_cpu_s']:>10.2f} s{one['share']:>8.1%}"
        )
    held = all(float(one["share"]) < LIMIT for one in found)
    result = {
        "sizes": found,
        "held": held,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "niceness": os.nice(0),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {RESULTS.relative_to(ROOT)}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
