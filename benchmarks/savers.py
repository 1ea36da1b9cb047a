"""The workload of checkpoint_stall.py: a state, training steps beside the saves, and each way to save."""

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
        # Weights and Adam's two moments: three floats of 4 bytes for each parameter.
        layer_bytes = 12 * (4 * width * width + 6 * width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 4 * width), nn.LayerNorm(width)])
            for _ in range(max(1, round(megabytes * 1e6 / layer_bytes)))
        )
        self.to(device)

        # Adam allocates its moments in the first step.
        self.optimizer = torch.optim.Adam(self.parameters())
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the model and of the optimizer."""
        moments = self.optimizer.state_dict()["state"].values()
        return [*self.state_dict().values(), *(tensor for entry in moments for tensor in entry.values())]

    def as_dict(self) -> dict[str, Any]:
        """Return the state as the methods of torch take it."""
        return {"model": self.state_dict(), "optimizer": self.optimizer.state_dict()}


class Steps:
    """A training that fits into the processor's caches, and the time of its steps."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.randn(128, 256)

    def take(self) -> float:
        """Take a step and return its seconds."""
        started = time.perf_counter()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def for_a_while(self, seconds: float) -> float:
        """Take steps for so many seconds and return the mean seconds of a step."""
        times = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            times.append(self.take())
        return statistics.mean(times)


class Peers:
    """The methods of torch. Each begins a save and returns a function that asks whether it is durable."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root
        self._number = 0

    def begin(self, method: str) -> Callable[[], bool]:
        """Begin a save; it has ended already if the method blocks until the end."""
        self._number += 1
        target = self._root / f"other-{self._number}"
        if method == ASYNC:
            response: Any = dcp.async_save(self._state.as_dict(), checkpoint_id=target)
            return lambda: bool(response.done() and response.result())

        if method == "DCP save":
            dcp.save(self._state.as_dict(), checkpoint_id=target)
            return lambda: True

        with target.open("wb") as stream:
            torch.save(self._state.as_dict(), stream)
            if method == "torch.save+fsync":
                stream.flush()
                os.fsync(stream.fileno())
        return lambda: True

    def tidy(self) -> None:
        """Remove the files of earlier saves, and let the disk rest: it may erase for a while."""
        for path in self._root.glob("other-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        os.sync()
        time.sleep(REST_S)


class Savers(Peers):
    """The peers, slurmddp in both ways, and dd."""

    def __init__(self, state: State, root: Path, agent: Distributon, alone: Distributon) -> None:
        super().__init__(state, root)
        self._agent = agent
        self._alone = alone

    def begin(self, method: str) -> Callable[[], bool]:
        """Begin a save by any method."""
        if method == "dd":
            return self._dd()
        if method == "slurmddp":
            return self._save(self._agent, self._root / "agent")
        if method == "slurmddp, no agent":
            return self._save(self._alone, self._root / "alone")
        return super().begin(method)

    def _save(self, distributon: Distributon, root: Path) -> Callable[[], bool]:
        self._number += 1
        distributon.save(
            self._number,
            root=root,
            keep_last=2,
            wait=False,
            model=self._state,
            optimizer=self._state.optimizer,
        )
        assert distributon._opened is not None
        saves = distributon._opened.saves

        def is_durable() -> bool:
            saves.poll()
            return not saves.is_writing

        return is_durable

    def _dd(self) -> Callable[[], bool]:
        """Write the bytes of the largest copy in memory by dd, past the kernel's cache."""
        if self._alone._opened is None:
            # In the rounds that warm up there may be no copy yet.
            return self.begin("slurmddp, no agent")

        source = max(self._alone._opened.saves._buffers._slots, key=lambda slot: slot.capacity).descriptor
        files = [f"if=/proc/self/fd/{source}", f"of={self._root}/other-dd"]
        options = ["bs=4M", "oflag=direct", "conv=fsync", "status=none"]
        process = subprocess.Popen(["dd", *files, *options], pass_fds=[source])
        return lambda: process.poll() is not None

    def tidy(self) -> None:
        """Also touch the memory for copies, as the measured copy touches its target.

        A host takes memory from its guests that they leave idle.
        """
        super().tidy()
        for opened in (self._agent._opened, self._alone._opened):
            if opened is None:
                continue
            for slot in opened.saves._buffers._slots:
                if slot.view is not None:
                    slot.view.bytes[:: shared_buffer.PAGE_BYTES].add_(0)
