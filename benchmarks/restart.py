"""Measure the time from the death of a rank to the next completed step of all ranks, beside torchrun.

    python benchmarks/restart.py [--rounds N] [--sizes 1x2 1x4 2x2] [--output FILE]

A small training (gloo, DistributedDataParallel, AdamW) saves its state after every step. In step 5 the last
rank ends itself by SIGKILL, once. In turn in every round:

torchrun           --max-restarts=3 --monitor-interval=0.1
torchrun default   --max-restarts=3, with torchrun's own interval
slurmddp           the agents, which restart the ranks in place

Under torchrun rank 0 saves by torch.save without a flush to the disk, its best case; under slurmddp by
`Distributon.save(wait=False)`. torchrun 2.13 keeps one store for all restarts. Restarted ranks may find
addresses of dead ranks in this store and hang, so TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 disables it. A time
ends when every rank has completed a step after the step of the death: all ranks run on one machine and read
one clock. Sizes are NODESxRANKS; one node is this machine, several are hosts of a sandbox (network
namespaces, as root), where srun starts one torchrun (rendezvous c10d) or one agent on each. 1x1gpu, added
where torch sees a GPU, trains there, over NCCL under torchrun; all others hide the GPUs. Ratios are medians
of the ratios of the rounds.
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
DIES_IN, LAST = 5, 10
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
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if step == {DIES_IN} and rank == last and not (STAMPS / "death").exists():
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
file, step = sys.argv[1], 0
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
os._exit(0)  # what comes after the last step is not measured, and gloo may abort in it
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
    if way == "slurmddp":
        program, policy = {"_target_": "ours.train"}, {"max_restarts_in_place": 3}
        return agents(size, folder, site, program=program, policy=policy)
    options = ["--max-restarts=3"]
    if way == "torchrun":
        options.append("--monitor-interval=0.1")
    if size.nodes > 1:
        options += [f"--rdzv-endpoint={site.hosts[0]}:29511", "--rdzv-backend=c10d"]
        options.append(f"--rdzv-id={secrets.token_hex(4)}")
    state = Path(tempfile.mkdtemp(prefix="state-", dir=folder)) / "state.pt"
    words = torchrun(size, *options, str(folder / "plain.py"), str(state))
    return Training(way, [(site.command(words), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})])


def seconds(way: str, size: Size, folder: Path, site: Site) -> float:
    """Return the seconds from the death of a rank to the next step that all ranks have completed."""
    training = prepare(way, size, folder, site)
    return measure(training, size, folder, site, lambda stamps: time_between(stamps, size.nodes * size.ranks))


def time_between(stamps: Path, ranks: int) -> float:
    """Return the time from the death to the last rank's first step after the one in which it came."""
    (death,) = read_stamps(stamps / "death")
    ends = []
    for rank in range(ranks):
        steps = read_stamps(stamps / f"rank-{rank}")
        ends.append(min(at for step, at in steps if step > death[0]))
        if steps[-1][0] != LAST:
            raise ValueError(f"rank {rank} did not come to its end")
    return max(ends) - death[1]


def read_stamps(file: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(int(step), float(at)) for step, at in lines]


def place(size: Size, folder: Path) -> AbstractContextManager[Site]:
    """Return this machine for one node, a sandbox for several."""
    if size.nodes == 1:
        return nullcontext(this_machine(folder))
    return cluster("restart", folder, size.nodes, cpus=4)


def measure_size(size: Size, folder: Path, rounds: int) -> dict[str, Any]:
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
    made = parser(__doc__, rounds=7)
    made.add_argument("--sizes", type=Size.read, nargs="+", help="default: 1x2 1x4 2x2, and 1x1gpu")
    return made


def main() -> int:
    asked = options().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # torchrun sets it for its ranks, and all should have the same
    chosen = sizes(asked.sizes, [Size(1, 2), Size(1, 4), Size(2, 2)], visible_gpus())
    with workplace("restart", {"bench_step.py": STEP, "plain.py": PLAIN, "ours.py": OURS}) as folder:
        found = {str(size): measure_size(size, folder, asked.rounds) for size in chosen}
    held = max(ratio for one in found.values() for ratio in one["slurmddp_to"].values()) <= LIMIT
    keep(asked.output, {**found, "held": held, "rounds": asked.rounds})
    print(f"\nslurmddp takes at most {LIMIT} of torchrun's time: {'yes' if held else 'no'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
