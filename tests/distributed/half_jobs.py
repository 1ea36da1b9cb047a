"""What the ranks of test_half_step run: a whole worker whose data set asks for a stop at a certain sample."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import rank_jobs
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from slurmddp.training import guard, worker

ASK_AT = "TEST_ASK_AT"
SLOW_S = 0.2


def run_dir() -> Path:
    return Path(os.environ["SLURMDDP_RUN_DIR"])


def work(folder: str, ask_at: int) -> int:
    """Run a worker whose last rank is told to stop when sample `ask_at` of this attempt is read; 0: never."""
    os.environ.update({"SLURMDDP_RUN_DIR": folder, "SLURMDDP_ATTEMPT": "0", ASK_AT: str(ask_at)})
    return worker.main(folder)


class Augmented(Dataset[Any]):
    """Random classes, augmented; from the sample on at which a stop is asked for, reading takes its time."""

    def __init__(self) -> None:
        self._ask_at, self._read = int(os.environ[ASK_AT]), 0

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._read += 1
        if self._read == self._ask_at:
            self._ask()
        elif 0 < self._ask_at < self._read:
            time.sleep(SLOW_S)
        if self._ask_at:
            # At once: a worker may be killed in the midst of it, and there is one for each rank.
            own = run_dir() / f"read-{os.getpid()}"
            own.write_text(str(self._read))
            own.replace(run_dir() / "read")
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator) + drawn, torch.randint(3, (), generator=generator)

    def _ask(self) -> None:
        """Ask when all ranks have come to this sample: then none can be a step ahead."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        (run_dir() / f"here-{rank}").touch()
        deadline = time.monotonic() + 100
        while len(list(run_dir().glob("here-*"))) < ranks:
            assert time.monotonic() < deadline, "not all ranks have come"
            time.sleep(0.01)
        if rank == ranks - 1:
            os.kill(os.getpid() if get_worker_info() is None else os.getppid(), signal.SIGTERM)


class WithHeldout(Augmented):
    def heldout(self) -> Augmented:
        return Augmented()


class Normed(nn.Module):
    """Draws at random in every pass, and keeps running means that depend on every batch.

    Layers of torch write into their buffers; models of one's own as often put a new tensor in their place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        found: torch.Tensor = self.inner(inputs)
        return found


class EarlyOnOne(rank_jobs.Net):
    """A model whose last rank alone is told to stop while it is built."""

    def __init__(self) -> None:
        super().__init__()
        guard.PATIENCE_S = 600  # the start may be slow here
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class StopFile(rank_jobs.Net):
    """A model during whose building somebody asks for a stop by `slurmddp stop`."""

    def __init__(self) -> None:
        super().__init__()
        (run_dir() / "stop").touch()
