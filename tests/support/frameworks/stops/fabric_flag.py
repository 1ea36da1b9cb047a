"""Train by Lightning Fabric, which shares a signal handler's flag; the script saves and returns."""

import os
import signal

import steps
import torch
from lightning.fabric import Fabric

asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
devices = int(os.environ["LOCAL_WORLD_SIZE"])
nodes = int(os.environ["WORLD_SIZE"]) // devices
fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy="ddp")
fabric.launch()
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
file = steps.FOLDER / "saved.ckpt"
state = {"model": model, "optimizer": optimizer, "step": 0}
if file.exists():
    fabric.load(file, state)
last = steps.last_step(state["step"])
while state["step"] < last and not fabric.all_reduce(torch.tensor(float(len(asked))), reduce_op="sum").item():
    fabric.backward(model(torch.ones(2, 1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    steps.taken(state["step"])
if state["step"] < last:
    fabric.save(file, state)
