"""Train by a loop on Lightning Fabric, which saves and loads its own checkpoint."""

import os

import progress
import torch
from lightning.fabric import Fabric

devices = int(os.environ["LOCAL_WORLD_SIZE"])
nodes = int(os.environ["WORLD_SIZE"]) // devices
fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy="ddp")
fabric.launch()
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
file = progress.FOLDER / "saved.ckpt"
state = {"model": model, "optimizer": optimizer, "step": 0}
if file.exists():
    fabric.load(file, state)
first = state["step"]
last = progress.last_step(first)
while state["step"] < last:
    fabric.backward(model(torch.full((2, 1), 1.0 + fabric.global_rank)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    progress.pace()
    fabric.save(file.with_suffix(".new"), state)
    if fabric.is_global_zero:
        file.with_suffix(".new").replace(file)
progress.record(fabric.global_rank, fabric.local_rank, fabric.world_size, first, last)
