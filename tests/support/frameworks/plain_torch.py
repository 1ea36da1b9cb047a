"""Train by plain torch.distributed, whose ranks meet by the variables of torchrun."""

import os

import progress
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, local_rank: int, world_size: int) -> None:
    """Train from the newest checkpoint on; rank 0 saves each step."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = progress.FOLDER / "saved.pt"
    first = 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    last = progress.last_step(first)
    for step in range(first + 1, last + 1):
        model(torch.full((2, 1), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.pace()
        if rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                file.with_suffix(".new"),
            )
            file.with_suffix(".new").replace(file)

    dist.destroy_process_group()
    progress.record(rank, local_rank, world_size, first, last)


if __name__ == "__main__":
    train(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
