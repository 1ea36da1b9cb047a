"""Measure the time from the command to the first completed training step, beside torchrun.

    python benchmarks/start.py [--rounds N] [--ranks 2 4] [--local | --sandbox] [--output FILE]

Four ways to start the same small training (gloo, DistributedDataParallel, AdamW, one step), in turn:

torchrun          torchrun --nproc-per-node=N on a plain script
by hand           the plain script N times, with the variables of the rendezvous set
slurmddp          the agent, on a function of a project (`program._target_`)
slurmddp script   the agent, on a plain script (`program.script`)

Locally each way is a plain process. On the cluster, a sandbox that the benchmark starts and removes, one srun
starts each way. A time ends when the last rank has written its time stamp, right after `optimizer.step()`.
For a function, the agent imports torch once per node; the other ways import it once per rank.

Ratios are medians of the ratios of the rounds. Where torch sees a GPU, one rank is also started there, over
NCCL (`1gpu`). All other trainings hide the GPUs, and the limit applies to them alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from peers import (
    Site,
    Size,
    Training,
    agents,
    cluster,
    measure,
    sizes,
    this_machine,
    torchrun,
    visible_gpus,
    workplace,
)
from record import as_json, free_port, in_turn, keep, parser, ratio

LIMIT = 0.5
"""The largest ratio of slurmddp's time to torchrun's time."""
WAYS = ("torchrun", "by hand", "slurmddp", "slurmddp script")

STEP = """
from bench_model import *

def step(model, optimizer):
    backward(model)
    finish(optimizer)
    stamp = STAMPS / os.environ["RANK"]
    stamp.with_suffix(".new").write_text(repr(time.time()))
    stamp.with_suffix(".new").rename(stamp)
"""
PLAIN = """
import os
if "RANK" not in os.environ:  # by hand under srun
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
import torch
from bench_step import replicas, step

ddp = replicas()
step(ddp, torch.optim.AdamW(ddp.parameters()))
os._exit(0)  # The end of the process is not measured, and gloo may abort in it.
"""
OURS = """
import torch
from bench_step import model, step
from slurmddp import Distributon

def train(distributon, config=None, folder=None):
    ddp = distributon.setup_model(model())
    step(ddp, distributon.setup_optimizer(torch.optim.AdamW(ddp.parameters())))

if __name__ == "__main__":
    with Distributon() as distributon:
        distributon.launch()
        train(distributon)
"""


def by_hand(size: Size, script: str, site: Site) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands and variables: the script once per rank, or one srun that starts all ranks."""
    command = [sys.executable, script]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if site.job:
        return [(site.command(command, tasks=size.ranks), rendezvous)]
    return [
        (command, {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size.ranks)})
        for rank in range(size.ranks)
    ]


def prepare(way: str, size: Size, folder: Path, site: Site) -> Training:
    """Return the training of one way."""
    script = str(folder / "plain.py")
    if way == "torchrun":
        return Training(way, [(site.command(torchrun(size, script), tasks=1), {})])
    if way == "by hand":
        return Training(way, by_hand(size, script, site))

    program = {"_target_": "ours.train"}
    if way == "slurmddp script":
        program = {"script": "ours.py"}
    return agents(size, folder, site, tasks=1, program=program)


def seconds(way: str, size: Size, folder: Path, site: Site) -> float:
    """Return the seconds from the command to the last rank's first completed step."""
    training = prepare(way, size, folder, site)
    started = time.time()

    def last_stamp(stamps: Path) -> float:
        return max(float((stamps / str(rank)).read_text()) for rank in range(size.ranks))

    return measure(training, size, folder, site, last_stamp) - started


def column(text: str) -> Size:
    """Return the size that `--ranks` names: a number of ranks on the CPUs, or `1gpu`."""
    return Size.read(f"1x{text}")


def name_of(size: Size) -> str:
    """Return the name of a size as `--ranks` takes it."""
    return str(size).removeprefix("1x")


def measure_site(where: str, folder: Path, site: Site, columns: list[Size], rounds: int) -> dict[str, Any]:
    """Measure all ways with each size at one site, and print medians and ratios to torchrun."""
    results = {}
    for size in columns:
        times = in_turn(WAYS, rounds, partial(seconds, size=size, folder=folder, site=site))
        ratios = {way: round(ratio(times[way], times["torchrun"]), 3) for way in WAYS}
        results[name_of(size)] = {**as_json(times), "to_torchrun": ratios}
        print(f"\n{where}, {name_of(size)} rank(s) ({rounds} rounds)")
        for way, values in times.items():
            print(f"  {way:<18}{statistics.median(values):7.2f} s{ratios[way]:8.2f}", flush=True)
    return results


def on_cpus(sites: dict[str, dict[str, Any]]) -> list[float]:
    """Return the ratios of slurmddp to torchrun that have a limit: all but those on a GPU."""
    columns = [column for site in sites.values() for column in site.items()]
    return [result["to_torchrun"]["slurmddp"] for name, result in columns if not name.endswith("gpu")]


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = parser(__doc__, rounds=7)
    options.add_argument(
        "--ranks", type=column, nargs="+", help="default: 2 4, and 1gpu where torch sees a GPU"
    )
    only = options.add_mutually_exclusive_group()
    only.add_argument("--local", action="store_true", help="without SLURM")
    only.add_argument("--sandbox", action="store_true", help="under srun only")
    return options


def main() -> int:
    """Measure the chosen sites and return 1 if a ratio on CPUs exceeds the limit."""
    arguments = options().parse_args()
    columns = sizes(arguments.ranks, [Size(1, 2), Size(1, 4)], visible_gpus())
    sites: dict[str, dict[str, Any]] = {}
    with workplace("start", {"bench_step.py": STEP, "plain.py": PLAIN, "ours.py": OURS}) as folder:
        if not arguments.sandbox:
            machine = this_machine(folder)
            sites["local"] = measure_site("this machine", folder, machine, columns, arguments.rounds)
        if not arguments.local:
            with cluster("start", folder, nodes=1, cpus=os.cpu_count() or 2) as job:
                sites["srun"] = measure_site("srun", folder, job, columns, arguments.rounds)

    ratios = on_cpus(sites)
    is_held = all(value <= LIMIT for value in ratios)
    keep(arguments.output, {**sites, "held": is_held, "rounds": arguments.rounds})
    if ratios:
        answer = "yes" if is_held else "no"
        print(f"\non CPUs slurmddp takes at most {LIMIT} of torchrun's time: {answer}")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
