"""The script under torchrun and ft_launcher: a complete snapshot, and a stop that all ranks agree on.

Arguments: folder, steps, save_every, step_s. Rank 0 writes the snapshot (weights, optimizer, random states of
all ranks, step) into a new file, flushes it to the disk and renames it. The batch script creates the file
`stop` when SLURM warns the job, and SIGTERM has the same effect. The ranks agree on the stop by an all-reduce
in each step.
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

FOLDER, STEPS, SAVE_EVERY, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
warned: list[int] = []


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, torch.get_rng_state())
    if distributed.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": states,
            "step": step,
        }
        with (FOLDER / "snapshot.new").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        (FOLDER / "snapshot.new").rename(FOLDER / "snapshot")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (FOLDER / "snapshot").exists():
        return 0
    state = torch.load(FOLDER / "snapshot")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][distributed.get_rank()])
    return int(state["step"])


def stops() -> bool:
    flag = torch.tensor(float(bool(warned) or (FOLDER / "stop").exists()))
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: warned.append(number))
    signal.signal(signal.SIGUSR2, lambda number, frame: warned.append(number))
    distributed.init_process_group("gloo")
    rank, marks = distributed.get_rank(), Marks(str(FOLDER))
    marks.begin(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(STEP_S))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load(model, optimizer)
    data = Samples(STEPS * BATCH * distributed.get_world_size())
    left = [*DistributedSampler(data, seed=0)][step * BATCH :]
    for inputs, targets in DataLoader(Subset(data, left), batch_size=BATCH):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        marks.step(rank, step)
        stop = stops()
        if stop or step % SAVE_EVERY == 0:
            save(step, model, optimizer)
        if stop:
            break
    if step == STEPS:
        (FOLDER / "finished").touch()
    distributed.barrier()
    os._exit(0)


main()
