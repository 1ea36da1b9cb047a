"""The script under torchrun and ft_launcher: a complete snapshot, and a stop that all ranks agree on.

Arguments: folder, steps, save_every, step_s. Rank 0 writes the snapshot (weights, optimizer, random states of
all ranks, step) into a new file, flushes it to the disk and renames it. The batch script creates the file
`stop` when SLURM warns the job; SIGTERM has the same effect. The ranks agree on the stop by an all-reduce in
each step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from goodput_training import BATCH, Marks, Net, Samples
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2])
SAVE_EVERY = int(sys.argv[3])
STEP_S = float(sys.argv[4])
SNAPSHOT = FOLDER / "snapshot"
signals: list[int] = []
"""The warnings that this rank has received."""


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the snapshot of a step; all ranks call it."""
    random_states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(random_states, torch.get_rng_state())
    if distributed.get_rank() != 0:
        return

    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": random_states,
        "step": step,
    }
    new_file = SNAPSHOT.with_suffix(".new")
    with new_file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new_file.rename(SNAPSHOT)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot and return its step; return 0 if no snapshot exists."""
    if not SNAPSHOT.exists():
        return 0

    state = torch.load(SNAPSHOT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][distributed.get_rank()])
    return int(state["step"])


def should_stop() -> bool:
    """Return whether any rank was warned; all ranks call it."""
    is_warned = bool(signals) or (FOLDER / "stop").exists()
    flag = torch.tensor(float(is_warned))
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag)


def main() -> None:
    """Train to the last step or to a stop, from the snapshot."""
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    marks = Marks(str(FOLDER))
    marks.begin(rank)

    torch.manual_seed(0)
    model = DistributedDataParallel(Net(STEP_S))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load(model, optimizer)
    data = Samples(STEPS * BATCH * distributed.get_world_size())
    indices_left = [*DistributedSampler(data, seed=0)][step * BATCH :]

    for inputs, targets in DataLoader(Subset(data, indices_left), batch_size=BATCH):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        marks.step(rank, step)

        is_stop = should_stop()
        if is_stop or step % SAVE_EVERY == 0:
            save(step, model, optimizer)
        if is_stop:
            break

    if step == STEPS:
        (FOLDER / "finished").touch()
    distributed.barrier()
    os._exit(0)  # gloo may abort in the ordinary end of a process.


main()
