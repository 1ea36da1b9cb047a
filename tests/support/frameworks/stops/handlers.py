"""Train by plain torch, with a signal handler that sets a flag (`flag`), or saves and exits (`exit`)."""

import os
import signal
import sys
from types import FrameType

import steps
import torch
import torch.distributed as dist

asked: list[int] = []
file = steps.FOLDER / "saved.pt"


def save() -> None:
    """Save the step on rank 0."""
    if os.environ["RANK"] == "0":
        torch.save({"step": step}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)


def end() -> None:
    """End the program; with its gloo group open, torch may abort it at its end, under torchrun too."""
    dist.destroy_process_group()
    sys.exit(0)


def flag(number: int, frame: FrameType | None) -> None:
    """Store the number of the signal, after which the loop saves and ends."""
    asked.append(number)


def leave(number: int, frame: FrameType | None) -> None:
    """Save, and exit from within the signal handler."""
    save()
    end()


signal.signal(signal.SIGTERM, leave if sys.argv[1] == "exit" else flag)
dist.init_process_group("gloo")
step = torch.load(file)["step"] if file.exists() else 0
last = steps.last_step(step)
while step < last:
    stop = torch.tensor([len(asked)])
    dist.all_reduce(stop)
    if stop.item():
        save()
        end()
    step += 1
    steps.taken(step)
dist.destroy_process_group()
