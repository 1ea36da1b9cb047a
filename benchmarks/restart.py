"""Measure the time from the death of a rank to the next completed step of all ranks, beside torchrun.

    python benchmarks/restart.py [--rounds N] [--sizes 1x2 1x4 2x2] [--output FILE]

A small training (gloo, DistributedDataParallel, AdamW) saves its state after every step. In step 5 the last
rank kills itself with SIGKILL, once. Three ways take turns in every round:

torchrun           --max-restarts=3 --monitor-interval=0.1
torchrun default   --max-restarts=3, with torchrun's own interval
slurmddp           the agents, which restart the ranks in place

Under torchrun rank 0 saves by torch.save without a flush to the disk, its best case. Under slurmddp it saves
by `Distributon.save(wait=False)`. torchrun 2.13 keeps one store for all restarts; restarted ranks may find
addresses of dead ranks in this store and hang, so TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 disables it.

A time ends when every rank has completed a step after the step of the death. All ranks run on one machine and
read one clock. Sizes are NODESxRANKS. One node is this machine. Several nodes are hosts of a sandbox (network
namespaces, as root), where srun starts one torchrun (rendezvous c10d) or one agent on each. 1x1gpu is added
where torch sees a GPU and trains there, over NCCL under torchrun; all other sizes hide the GPUs. Ratios are
medians of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
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
from record import as_json, in_turn, keep, parser, ratio

LIMIT = 0.1
"""The largest ratio of slurmddp's time to torchrun's time."""
DIES_IN = 5
"""The step in which the last rank kills itself."""
LAST = 10
"""The last step."""
WAYS = ("torchrun", "torchrun default", "slurmddp")

STEP = f"""
from bench_model import *

LAST = {LAST}

def stamp(name, text):
    descriptor = os.open(STAMPS / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{{text}} {{time.monotonic()!r}}\\n".encode())
    os.close(descriptor)

def take(model, optimizer, step):
    backward(model)
    rank = int(os.environ["RANK"])
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    if step == {DIES_IN} and is_last and not (STAMPS / "death").exists():
        stamp("death", step)
        os.kill(os.getpid(), signal.SIGKILL)
    finish(optimizer)
    optimizer.zero_grad()
    stamp(f"rank-{{rank}}", step)
"""
PLAIN = """
import os, sys
import torch
from bench_step import LAST, replicas, take

ddp = replicas()
optimizer = torch.optim.AdamW(ddp.parameters())
file = sys.argv[1]
step = 0
if os.path.exists(file):
    state = torch.load(file)
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < LAST:
    step += 1
    take(ddp, optimizer, step)
    if torch.distributed.get_rank() == 0:
        state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, file + ".new")
        os.rename(file + ".new", file)
torch.distributed.barrier()
os._exit(0)  # The end of the process is not measured, and gloo may abort in it.
"""
OURS = """
import torch
from bench_step import LAST, model, take

def train(distributon, config, folder):
    ddp = distributon.setup_model(model())
    optimizer = distributon.setup_optimizer(torch.optim.AdamW(ddp.parameters()))
    objects = {"model": ddp, "optimizer": optimizer}
    step = distributon.load(root=folder.checkpoints_dir, **objects) or 0
    while step < LAST:
        step += 1
        take(ddp, optimizer, step)
        distributon.save(step, root=folder.checkpoints_dir, wait=False, **objects)
"""


def prepare(way: str, size: Size, folder: Path, site: Site) -> Training:
    """Return the training of one way."""
    if way == "slurmddp":
        program = {"_target_": "ours.train"}
        return agents(size, folder, site, program=program, policy={"max_restarts_in_place": 3})

    options = ["--max-restarts=3"]
    if way == "torchrun":
        options.append("--monitor-interval=0.1")
    if size.nodes > 1:
        options += [f"--rdzv-endpoint={site.hosts[0]}:29511", "--rdzv-backend=c10d"]
        options.append(f"--rdzv-id={secrets.token_hex(4)}")
    state = Path(tempfile.mkdtemp(prefix="state-", dir=folder)) / "state.pt"
    command = torchrun(size, *options, str(folder / "plain.py"), str(state))
    return Training(way, [(site.command(command), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})])


def seconds(way: str, size: Size, folder: Path, site: Site) -> float:
    """Return the seconds from the death of a rank to the next step that all ranks have completed."""
    training = prepare(way, size, folder, site)
    ranks = size.nodes * size.ranks
    return measure(training, size, folder, site, lambda stamps: time_between(stamps, ranks))


def time_between(stamps: Path, ranks: int) -> float:
    """Return the seconds from the death to the end of the last rank's first step after the step of the death.

    Raises:
        ValueError: a rank has not completed the last step.
    """
    ((step_of_death, time_of_death),) = read_stamps(stamps / "death")
    next_steps = []
    for rank in range(ranks):
        steps = read_stamps(stamps / f"rank-{rank}")
        last_step, _ = steps[-1]
        if last_step != LAST:
            raise ValueError(f"rank {rank} ended after step {last_step} of {LAST}")
        next_steps.append(min(time for step, time in steps if step > step_of_death))
    return max(next_steps) - time_of_death


def read_stamps(file: Path) -> list[tuple[int, float]]:
    """Return the steps of a file of stamps with their times, in seconds."""
    stamps = []
    for line in file.read_text().splitlines():
        step, time = line.split()
        stamps.append((int(step), float(time)))
    return stamps


def place(size: Size, folder: Path) -> AbstractContextManager[Site]:
    """Return this machine for one node, and a sandbox for several."""
    if size.nodes == 1:
        return nullcontext(this_machine(folder))
    return cluster("restart", folder, size.nodes, cpus=4)


def measure_size(size: Size, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure all ways with one size, and print medians and the ratios of slurmddp to torchrun."""
    with place(size, folder) as site:
        times = in_turn(WAYS, rounds, lambda way: seconds(way, size, folder, site))

    ratios = {way: round(ratio(times["slurmddp"], times[way]), 4) for way in WAYS[:2]}
    print(f"\n{size}: {size.nodes} node(s), {size.ranks} rank(s) on each ({rounds} rounds)")
    for way, values in times.items():
        print(f"  {way:<18}{statistics.median(values):8.3f} s   ({min(values):.3f} to {max(values):.3f})")
    shares = " and ".join(f"{share:g} of the time of {way}" for way, share in ratios.items())
    print(f"  slurmddp takes {shares}", flush=True)
    return {**as_json(times), "slurmddp_to": ratios}


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--sizes", type=Size.read, nargs="+", help="default: 1x2 1x4 2x2, and 1x1gpu")
    return options


def main() -> int:
    """Measure the chosen sizes and return 1 if a ratio exceeds the limit."""
    arguments = options().parse_args()
    # torchrun sets this variable for its ranks. Set it for all ways.
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = sizes(arguments.sizes, [Size(1, 2), Size(1, 4), Size(2, 2)], visible_gpus())
    with workplace("restart", {"bench_step.py": STEP, "plain.py": PLAIN, "ours.py": OURS}) as folder:
        results = {str(size): measure_size(size, folder, arguments.rounds) for size in chosen}

    ratios = [share for result in results.values() for share in result["slurmddp_to"].values()]
    is_held = max(ratios) <= LIMIT
    keep(arguments.output, {**results, "held": is_held, "rounds": arguments.rounds})
    answer = "yes" if is_held else "no"
    print(f"\nslurmddp takes at most {LIMIT} of torchrun's time: {answer}")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
