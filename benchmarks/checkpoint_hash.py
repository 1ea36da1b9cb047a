"""Measure the share of hashing in the time of a save.

    python benchmarks/checkpoint_hash.py [--rounds N] [--busy N] [--dir FOLDER] [--output FILE]

Two answers, for states of 100 MB and 600 MB, as medians over the rounds; less than 5 % is promised.
`alone`: the share of a save during which it hashes while nothing is flushed, from the moments at which both
begin and end; hashing and writing never overlap. `paired`: (with - without) / with, from saves that take
turns, as they are and with a digest that does nothing; on a shared machine it scatters widely. `fsync` is
part of a save; the disk is what `--dir` stands on. `--busy N` runs N processes beside it that never rest.
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


class NoDigest:
    """Stands in for the digest and looks at nothing."""

    def update(self, data: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


class Watch:
    """Notes when a save hashes and when it flushes."""

    def __init__(self) -> None:
        self.hashes: list[tuple[float, float]] = []
        self.flushes: list[tuple[float, float]] = []

    def timed(self, action: Callable[..., Any], into: list[tuple[float, float]]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = action(*args)
            into.append((started, time.perf_counter()))
            return result

        return call

    def digest(self) -> Any:
        real = xxhash.xxh3_128()
        return SimpleNamespace(update=self.timed(real.update, self.hashes), hexdigest=real.hexdigest)

    def alone_s(self) -> float:
        """Return the seconds of hashing beside which nothing was flushed."""
        both = sum(
            max(0.0, min(hashed[1], flushed[1]) - max(hashed[0], flushed[0]))
            for hashed in self.hashes
            for flushed in self.flushes
        )
        return sum(stop - start for start, stop in self.hashes) - both


@contextmanager
def watched(hashed: bool) -> Iterator[Watch]:
    watch, digest, fsync = Watch(), durable.Digest, os.fsync
    durable.Digest = watch.digest if hashed else NoDigest
    os.fsync = watch.timed(fsync, watch.flushes)
    try:
        yield watch
    finally:
        durable.Digest, os.fsync = digest, fsync


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Return a state of a hundred tensors, as a model and its optimizer would have."""
    return {f"w{number}": torch.randn(megabytes * 10_000 // 4) for number in range(100)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep that many cores at work."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def save_s(root: Path, state: dict[str, torch.Tensor], hashed: bool) -> tuple[float, float]:
    """Return the seconds that a save takes, and those of them in which it only hashes."""
    shutil.rmtree(root, ignore_errors=True)
    os.sync()  # so that no save pays for what another has left in the page cache
    with watched(hashed) as watch:
        started = time.perf_counter()
        checkpoint.write(root, 1, state, meta={}, keep_last=3)
        return time.perf_counter() - started, watch.alone_s()


def spread(values: list[float]) -> dict[str, object]:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return {
        "median": round(middle, 4),
        "quartiles": [round(lower, 4), round(upper, 4)],
        "all": [round(value, 4) for value in values],
    }


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    state, root = state_of(megabytes), folder / "checkpoints"
    pairs: list[dict[bool, tuple[float, float]]] = []
    for number in range(rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        pairs.append({hashed: save_s(root, state, hashed) for hashed in order})
    del pairs[0]  # it filled caches
    data = bytes([1]) * (megabytes * 1_000_000)
    started = time.thread_time()
    durable.Digest(data).hexdigest()
    alone_s = time.thread_time() - started
    return {
        "megabytes": megabytes,
        "hash_cpu_s": round(alone_s, 4),
        "save_s": spread([pair[True][0] for pair in pairs]),
        "save_without_hash_s": spread([pair[False][0] for pair in pairs]),
        "alone": spread([pair[True][1] / pair[True][0] for pair in pairs]),
        "paired": spread([1 - pair[False][0] / pair[True][0] for pair in pairs]),
    }


def main() -> int:
    made = parser(__doc__, rounds=15)
    made.add_argument("--busy", type=int, default=0, help="processes that keep cores at work (default: 0)")
    made.add_argument("--dir", type=Path, help="a folder on the disk to measure (default: this one)")
    options = made.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.dir or Path(__file__).parent) as folder, busy(options.busy):
        found = [measure(size, options.rounds, Path(folder)) for size in SIZES_MB]
    print(f"{'state':>8}{'save':>10}{'no hash':>10}{'hash, CPU':>12}{'alone':>8}{'paired':>8}")
    for one in found:
        save, without, alone, paired = (
            one[key]["median"] for key in ("save_s", "save_without_hash_s", "alone", "paired")
        )
        print(f"{one['megabytes']:>5} MB{save:>8.3f} s{without:>8.3f} s", end="")
        print(f"{one['hash_cpu_s']:>10.3f} s{alone:>8.1%}{paired:>8.1%}")
    held = all(one["alone"]["median"] < LIMIT for one in found)
    result = {
        "sizes": found,
        "alone_held": held,
        "busy": options.busy,
        "niceness": os.nice(0),
        "xxhash": xxhash.VERSION,
    }
    keep(options.output, result)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
