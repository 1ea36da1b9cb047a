"""Train by a loop on Accelerate, which saves its state into a folder for each saved step."""

import progress
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
saved = sorted(progress.FOLDER.glob("step-*"))
first = int(saved[-1].name.partition("-")[2]) if saved else 0
if saved:
    accelerator.load_state(str(saved[-1]))
last = progress.last_step(first)
for step in range(first + 1, last + 1):
    accelerator.backward(model(torch.full((2, 1), 1.0 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    progress.pace()
    unfinished = progress.FOLDER / f"unfinished-{progress.ATTEMPT}-{step}"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(progress.FOLDER / f"step-{step:08d}")
progress.record(
    accelerator.process_index, accelerator.local_process_index, accelerator.num_processes, first, last
)
accelerator.end_training()
