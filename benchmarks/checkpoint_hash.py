"""Measure the share of hashing in the time of a save.

    python benchmarks/checkpoint_hash.py [--rounds N] [--busy N] [--dir FOLDER] [--output FILE]

States of 100 MB and 600 MB are saved into the folder `--dir`, and flushed to its disk. Two shares are
printed, as medians over the rounds; the limit of the first is 5 %:

- `alone`: the share of a save during which it hashes while nothing is flushed. It follows from the moments
  at which hashes and flushes begin and end; hashing and writing never overlap.
- `paired`: (with - without) / with, from saves that take turns: as they are, and with a digest that does
  nothing. It scatters widely on a shared machine.

`--busy N` runs N processes beside the saves that never rest.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from record import keep, parser

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import durable

SIZES_MB = (100, 600)
LIMIT = 0.05
Interval = tuple[float, float]
"""Start and end of a call."""


class NoDigest:
    """A digest that reads nothing."""

    def update(self, data: memoryview) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return a text as long as a real digest."""
        return "0" * 32


class Watch:
    """The intervals in which one save hashes and flushes."""

    def __init__(self) -> None:
        self.hashes: list[Interval] = []
        self.flushes: list[Interval] = []

    def timed(self, action: Callable[..., Any], intervals: list[Interval]) -> Callable[..., Any]:
        """Return a function that calls `action` and records the interval of each call."""

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = action(*args)
            intervals.append((started, time.perf_counter()))
            return result

        return call

    def digest(self) -> Any:
        """Return a digest whose updates are recorded."""
        digest = xxhash.xxh3_128()
        return SimpleNamespace(update=self.timed(digest.update, self.hashes), hexdigest=digest.hexdigest)

    def alone_s(self) -> float:
        """Return the seconds of hashing during which nothing was flushed."""
        overlap_s = 0.0
        for hash_start, hash_end in self.hashes:
            for flush_start, flush_end in self.flushes:
                overlap_s += max(0.0, min(hash_end, flush_end) - max(hash_start, flush_start))
        return sum(end - start for start, end in self.hashes) - overlap_s


@contextmanager
def watched(is_hashed: bool) -> Iterator[Watch]:
    """Record hashes and flushes during the block; without `is_hashed`, saves hash nothing."""
    watch = Watch()
    digest = durable.Digest
    fsync = os.fsync
    durable.Digest = watch.digest if is_hashed else NoDigest
    os.fsync = watch.timed(fsync, watch.flushes)
    try:
        yield watch
    finally:
        durable.Digest = digest
        os.fsync = fsync


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Return a state of a hundred tensors, as a model and its optimizer would have."""
    return {f"w{number}": torch.randn(megabytes * 10_000 // 4) for number in range(100)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """During the block, run `count` processes, each of which keeps a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def save_s(root: Path, state: dict[str, torch.Tensor], is_hashed: bool) -> tuple[float, float]:
    """Return the seconds of a save, and the part of them in which it hashes and flushes nothing."""
    shutil.rmtree(root, ignore_errors=True)
    os.sync()  # so that no save pays for what another has left in the page cache
    with watched(is_hashed) as watch:
        started = time.perf_counter()
        checkpoint.write(root, 1, state, meta={}, keep_last=3)
        return time.perf_counter() - started, watch.alone_s()


def spread(values: list[float]) -> dict[str, object]:
    """Return the median, the quartiles and all values."""
    lower, middle, upper = statistics.quantiles(values, n=4)
    return {
        "median": round(middle, 4),
        "quartiles": [round(lower, 4), round(upper, 4)],
        "all": [round(value, 4) for value in values],
    }


def hash_cpu_s(megabytes: int) -> float:
    """Return the CPU seconds of the digest of so many bytes."""
    data = bytes([1]) * (megabytes * 1_000_000)
    started = time.thread_time()
    durable.Digest(data).hexdigest()
    return time.thread_time() - started


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one size: saves with and without hashing take turns."""
    state = state_of(megabytes)
    pairs: list[dict[bool, tuple[float, float]]] = []
    for number in range(rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        pairs.append({is_hashed: save_s(folder / "checkpoints", state, is_hashed) for is_hashed in order})
    del pairs[0]  # The first round fills caches.

    return {
        "megabytes": megabytes,
        "hash_cpu_s": round(hash_cpu_s(megabytes), 4),
        "save_s": spread([pair[True][0] for pair in pairs]),
        "save_without_hash_s": spread([pair[False][0] for pair in pairs]),
        "alone": spread([pair[True][1] / pair[True][0] for pair in pairs]),
        "paired": spread([1 - pair[False][0] / pair[True][0] for pair in pairs]),
    }


def show(sizes: list[dict[str, Any]]) -> None:
    """Print one line for each size."""
    print(f"{'state':>8}{'save':>10}{'no hash':>10}{'hash, CPU':>12}{'alone':>8}{'paired':>8}")
    for size in sizes:
        save, without, alone, paired = (
            size[key]["median"] for key in ("save_s", "save_without_hash_s", "alone", "paired")
        )
        print(f"{size['megabytes']:>5} MB{save:>8.3f} s{without:>8.3f} s", end="")
        print(f"{size['hash_cpu_s']:>10.3f} s{alone:>8.1%}{paired:>8.1%}")


def main() -> int:
    """Measure, print the shares, and return 1 if `alone` exceeds its limit."""
    options = parser(__doc__, rounds=15)
    options.add_argument("--busy", type=int, default=0, help="processes that keep cores at work (default: 0)")
    options.add_argument("--dir", type=Path, help="a folder on the disk to measure (default: this one)")
    arguments = options.parse_args()

    torch.manual_seed(0)
    parent = arguments.dir or Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=parent) as folder, busy(arguments.busy):
        sizes = [measure(megabytes, arguments.rounds, Path(folder)) for megabytes in SIZES_MB]

    show(sizes)
    is_held = all(size["alone"]["median"] < LIMIT for size in sizes)
    results = {
        "sizes": sizes,
        "alone_held": is_held,
        "busy": arguments.busy,
        "niceness": os.nice(0),
        "xxhash": xxhash.VERSION,
    }
    keep(arguments.output, results)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
