"""Functions that tests call on workers by their import path."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


def wait_for(path):
    """Return once the file is there."""
    deadline = time.monotonic() + 120
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


def append(path, text):
    with Path(path).open("a") as file:
        file.write(text)


def fail(text):
    raise ValueError(text)


class Counter:
    """An object that stays on its worker."""

    def __init__(self, start):
        self.value = start


def add(counter, tensor, more=None):
    counter.value += int(tensor.sum()) + len(more or {})
    return {"value": counter.value, "tensor": tensor * 2, "pid": os.getpid()}


def unknown():
    return {"file": Path()}


def values():
    return [None, True, 1.5, float("inf"), "text", {"a": (1, 2)}, torch.bfloat16, 1j]
