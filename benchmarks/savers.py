"""The workload of checkpoint_stall.py: a state, steps beside it, and each way to save the state."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.training.distributon import Distributon

REST_S = 1.0
ASYNC = "DCP async_save"


class State(nn.Module):
    """A model whose state, with Adam's, has about so many megabytes: large matrices and small vectors."""

    def __init__(self, megabytes: int, device: str) -> None:
        super().__init__()
        width = 512 if megabytes < 300 else 1024
        layer_bytes = 12 * (4 * width * width + 6 * width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 4 * width), nn.LayerNorm(width)])
            for _ in range(max(1, round(megabytes * 1e6 / layer_bytes)))
        )
        self.to(device)
        self.optimizer = torch.optim.Adam(self.parameters())
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"].values()
        moments = [part for one in state for part in one.values()]
        return [*self.state_dict().values(), *moments]

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.state_dict(), "optimizer": self.optimizer.state_dict()}


class Steps:
    """A training small enough to live in the processor's caches, and its steps on the clock."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.randn(128, 256)

    def take(self) -> float:
        started = time.perf_counter()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def for_a_while(self, seconds: float) -> float:
        """Return the mean time of a step."""
        taken = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            taken.append(self.take())
        return statistics.mean(taken)


class Peers:
    """Each method of torch as a call that begins a save and returns a question whether it is durable."""

    def __init__(self, state: State, root: Path) -> None:
        self._state, self._root = state, root
        self._number = 0

    def begin(self, method: str) -> Callable[[], bool]:
        self._number += 1
        target = self._root / f"other-{self._number}"
        if method == ASYNC:
            response: Any = dcp.async_save(self._state.as_dict(), checkpoint_id=target)
            return lambda: bool(response.done() and response.result())
        if method == "DCP save":
            dcp.save(self._state.as_dict(), checkpoint_id=target)
        else:
            with target.open("wb") as stream:
                torch.save(self._state.as_dict(), stream)
                if method == "torch.save+fsync":
                    stream.flush()
                    os.fsync(stream.fileno())
        return lambda: True

    def tidy(self) -> None:
        """Remove what was written, and let the disk come to rest: it may erase for a while."""
        for path in self._root.glob("other-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        time.sleep(REST_S)


class Savers(Peers):
    """The peers, slurmddp in both ways, and dd."""

    def __init__(self, state: State, root: Path, agent: Distributon, alone: Distributon) -> None:
        super().__init__(state, root)
        self._agent, self._alone = agent, alone

    def begin(self, method: str) -> Callable[[], bool]:
        if method == "dd":
            return self._dd()
        if not method.startswith("slurmddp"):
            return super().begin(method)
        self._number += 1
        d = self._agent if method == "slurmddp" else self._alone
        root = self._root / ("agent" if d is self._agent else "alone")
        d.save(
            self._number,
            root=root,
            keep_last=2,
            wait=False,
            model=self._state,
            optimizer=self._state.optimizer,
        )
        saves = None if d._opened is None else d._opened.saves

        def is_durable() -> bool:
            assert saves is not None
            saves.poll()
            return not saves.is_writing

        return is_durable

    def _dd(self) -> Callable[[], bool]:
        if self._alone._opened is None:
            return self.begin("slurmddp, no agent")  # One that warms up, before anything is in memory.
        source = max(self._alone._opened.saves._buffers._slots, key=lambda slot: slot.capacity).descriptor
        words = [f"if=/proc/self/fd/{source}", f"of={self._root}/other-dd", "bs=4M", "oflag=direct"]
        process = subprocess.Popen(["dd", *words, "conv=fsync", "status=none"], pass_fds=[source])
        return lambda: process.poll() is not None

    def tidy(self) -> None:
        """Use the memory for copies too, as the yardstick's is used: hosts take what is idle from guests."""
        super().tidy()
        for opened in (self._agent._opened, self._alone._opened):
            for slot in opened.saves._buffers._slots if opened is not None else ():
                if slot.view is not None:
                    slot.view.bytes[:: shared_buffer.PAGE_BYTES].add_(0)
