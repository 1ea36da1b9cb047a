"""Train by Accelerate, whose trigger passes a signal to all ranks; the script saves its state and returns."""

import signal

import steps
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
signal.signal(signal.SIGTERM, lambda number, frame: accelerator.set_trigger())
saved = sorted(steps.FOLDER.glob("step-*"))
step = int(saved[-1].name.partition("-")[2]) if saved else 0
if saved:
    accelerator.load_state(str(saved[-1]))
last = steps.last_step(step)
while step < last and not accelerator.check_trigger():
    accelerator.backward(model(torch.ones(2, 1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    steps.taken(step)
if step < last:
    accelerator.save_state(str(steps.FOLDER / f"step-{step:08d}"))
accelerator.end_training()
