"""Functions that tests call on workers by their import path."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import torch

from slurmddp import Distributon


def wait_for(path):
    """Wait until the file exists."""
    deadline = time.monotonic() + 120
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


def append(path, text):
    with Path(path).open("a") as file:
        file.write(text)


def limit_memory(more_bytes):
    """Limit the memory that this process may map in addition; None: without limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = -1 if more_bytes is None else pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))


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


def model_and_data():
    """Return a model, and for each of three steps the batches of two replicas."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    return model, torch.randn(3, 2, 4, 5)


def trained_by_ddp():
    """Return the weights of this rank after three steps under DistributedDataParallel."""
    with Distributon() as d:
        d.launch()
        model, data = model_and_data()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

        for step in range(3):
            optimizer.zero_grad()
            (wrapped(data[step, d.rank]) ** 2).mean().backward()
            optimizer.step()

        return [parameter.tolist() for parameter in model.parameters()]
