"""Rank programs of test_memory: ranks save beside the training, die, and resume from the state in memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.environments.names import MEMORY_VARIABLE
from slurmddp.errors import SlurmddpError
from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import Net, batch_of, weights


class Loop:
    """A training of a few steps with batch normalisation, dropout and a loader."""

    def __init__(self, d: Distributon) -> None:
        self.d = d
        self.step = 0
        net = nn.Sequential(Net(dropout=0.3), nn.BatchNorm1d(3))
        self.model = d.setup_model(net)
        self.optimizer = d.setup_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        x, y = batch_of(0, 64)
        self.loader = d.setup_dataloader(DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
        self.progress: dict[str, Any] = {"note": "begun"}
        self._batches = self._endless()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, until: int) -> None:
        while self.step < until:
            inputs, targets = next(self._batches)
            self.d.backward(nn.functional.cross_entropy(self.model(inputs), targets))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.progress["note"] = f"step {self.step}"

    def result(self) -> dict[str, Any]:
        model = self.d.unwrap(self.model)
        # After a step the buffers of replicas differ until the next step begins. So compare rank 0's only.
        kept = {key: item for key, item in weights(model).items() if self.d.rank == 0 or "running" not in key}
        optimizer = self.optimizer.state_dict()["state"]
        return {"weights": kept, "optimizer": optimizer, "note": self.progress["note"], "draw": torch.rand(3)}


def killed_after_the_copy(root: str, step: int) -> None:
    """Save without `wait`, and kill this process immediately after the copy."""
    with Distributon(seed=1) as d:
        d.launch()
        loop = Loop(d)
        loop.train(step)
        d.save(step, root=root, wait=False, **loop.objects)
        os.kill(os.getpid(), signal.SIGKILL)


def copy_to_memory(d: Distributon, root: str | Path, step: int, **objects: Any) -> None:
    """Copy a state into memory. Call it twice, because the first call only starts to allocate the memory."""
    for _ in range(2):
        d.memory_save(step, root=root, **objects)
        d._checkpointer.saves._buffers._join()


def resumed_from_memory(root: str, holders: list[int]) -> list[dict[str, Any]]:
    """Train after copies of steps 4 and 5, then resume.

    Only the ranks `holders` still have the copy of step 5.
    """
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        saves = d._checkpointer.saves
        saves.copies_state = saves.has_copies_elsewhere = (
            True  # As the first rank of each node, under agents.
        )
        loop.train(4)
        copy_to_memory(d, root, 4, **loop.objects)
        loop.train(5)
        d.memory_save(5, root=root, **loop.objects)
        loop.train(9)
        undisturbed = {"begun": 5, "from": "memory", "result": loop.result()}
        if d.rank not in holders:
            saves._buffers.discard_after((4, time.time_ns()))
        held = [str(os.dup(number)) for number in saves._buffers.descriptors]
        os.environ[MEMORY_VARIABLE] = ",".join(held)

    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        begun = loop.step = d.load(root=root, **loop.objects) or 0
        loop.train(9)
        return [undisturbed, {"begun": begun, "from": d.resumed_from, "result": loop.result()}]


def train_and_save(root: str, steps: list[int], wait: bool) -> dict[str, Any]:
    """Save at each of `steps`, and close the Distributon."""
    with Distributon(seed=1) as d:
        d.launch()
        loop = Loop(d)
        for step in steps:
            loop.train(step)
            d.save(step, root=root, wait=wait, **loop.objects)

        return loop.result()


def errors_beside(root: str) -> dict[str, str]:
    """Return each rank's error of a save that fails in the writer, and of the calls after it."""
    messages: dict[str, str] = {}
    with Distributon(seed=1) as d:
        d.launch()
        loop = Loop(d)
        for name in ("finish", "next", "after"):
            file = Path(root, name)
            d.barrier()
            if d.is_global_zero:
                file.touch()
            d.barrier()
            try:
                if name == "after":
                    d.save(1, root=Path(root, "good"), wait=False, **loop.objects)
                    d.finish_saving()
                    messages[name] = "good"
                    continue

                d.save(1, root=file, wait=False, **loop.objects)
                if name == "finish":
                    d.finish_saving()
                else:
                    while d.is_global_zero and d._opened is not None and d._opened.saves.is_writing:
                        d._opened.saves.poll()
                        time.sleep(0.01)

                    d.save(2, root=Path(root, "good"), wait=True, **loop.objects)
            except SlurmddpError as error:
                messages[name] = f"{type(error).__name__}: {error}"

    return messages
