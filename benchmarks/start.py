"""Measure the time from the command to the first completed training step, beside torchrun.

    python benchmarks/start.py [--rounds N] [--ranks 2 4] [--local | --sandbox] [--output FILE]

Four ways to start the same small training (gloo, DistributedDataParallel, AdamW, one step), in turn:

torchrun          torchrun --nproc-per-node=N on a plain script
by hand           the plain script N times, with the variables of the rendezvous set
slurmddp          the agent, on a function of a project (`program._target_`)
slurmddp script   the agent, on a plain script (`program.script`)

Locally each way is a plain process. On the cluster, a sandbox that the benchmark starts and removes, one srun
starts each way. A time ends when the last rank has written its time stamp, right after `optimizer.step()`.
The agent imports once per node for a function; the other ways import once per rank. Ratios are medians of
the ratios of the rounds. Where torch sees a GPU, one rank is started there as well (`1gpu`), over NCCL; all
others hide the GPUs, and the limit is for them.
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
os._exit(0)  # what comes after the step is not measured, and gloo may abort in it
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
    """Return the script once per rank, or once for a srun that starts it so often."""
    plain = [sys.executable, script]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if site.job:
        return [(site.command(plain, tasks=size.ranks), meeting)]
    return [
        (plain, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size.ranks)})
        for rank in range(size.ranks)
    ]


def prepare(way: str, size: Size, folder: Path, site: Site) -> Training:
    script = str(folder / "plain.py")
    if way == "torchrun":
        return Training(way, [(site.command(torchrun(size, script), tasks=1), {})])
    if way == "by hand":
        return Training(way, by_hand(size, script, site))
    program = {"script": "ours.py"} if way == "slurmddp script" else {"_target_": "ours.train"}
    return agents(size, folder, site, tasks=1, program=program)


def seconds(way: str, size: Size, folder: Path, site: Site) -> float:
    """Return the seconds from the command to the last rank's first completed step."""
    training = prepare(way, size, folder, site)
    started = time.time()

    def last(stamps: Path) -> float:
        return max(float((stamps / str(rank)).read_text()) for rank in range(size.ranks))

    return measure(training, size, folder, site, last) - started


def column(text: str) -> Size:
    """Return what `--ranks` names: so many on the CPUs, or `1gpu`."""
    return Size.read(f"1x{text}")


def name(size: Size) -> str:
    return str(size).removeprefix("1x")


def measure_site(where: str, folder: Path, site: Site, columns: list[Size], rounds: int) -> dict[str, Any]:
    found = {}
    for size in columns:
        times = in_turn(WAYS, rounds, partial(seconds, size=size, folder=folder, site=site))
        ratios = {way: round(ratio(times[way], times["torchrun"]), 3) for way in WAYS}
        found[name(size)] = {**as_json(times), "to_torchrun": ratios}
        print(f"\n{where}, {name(size)} rank(s) ({rounds} rounds)")
        for way, taken in times.items():
            print(f"  {way:<18}{statistics.median(taken):7.2f} s{ratios[way]:8.2f}", flush=True)
    return found


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, rounds=7)
    made.add_argument("--ranks", type=column, nargs="+", help="default: 2 4, and 1gpu where torch sees a GPU")
    only = made.add_mutually_exclusive_group()
    only.add_argument("--local", action="store_true", help="without SLURM")
    only.add_argument("--sandbox", action="store_true", help="under srun only")
    return made


def main() -> int:
    asked = options().parse_args()
    columns = sizes(asked.ranks, [Size(1, 2), Size(1, 4)], visible_gpus())
    found: dict[str, dict[str, Any]] = {}
    with workplace("start", {"bench_step.py": STEP, "plain.py": PLAIN, "ours.py": OURS}) as folder:
        if not asked.sandbox:
            here = this_machine(folder)
            found["local"] = measure_site("this machine", folder, here, columns, asked.rounds)
        if not asked.local:
            with cluster("start", folder, nodes=1, cpus=os.cpu_count() or 2) as job:
                found["srun"] = measure_site("srun", folder, job, columns, asked.rounds)
    ratios = on_cpus(found)
    held = all(ratio <= LIMIT for ratio in ratios)
    keep(asked.output, {**found, "held": held, "rounds": asked.rounds})
    if ratios:
        print(f"\non CPUs slurmddp takes at most {LIMIT} of torchrun's time: {'yes' if held else 'no'}")
    return 0 if held else 1


def on_cpus(found: dict[str, dict[str, Any]]) -> list[float]:
    """Return the ratios that the limit is for."""
    columns = [column for site in found.values() for column in site.items()]
    return [one["to_torchrun"]["slurmddp"] for name, one in columns if not name.endswith("gpu")]


if __name__ == "__main__":
    sys.exit(main())
