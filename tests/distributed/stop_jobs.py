"""What the ranks of test_stop_paths run: whole workers that are asked to stop in one way or another."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from slurmddp.training import worker


class Countdown(torch.utils.data.Dataset[Any]):
    """Random classes; the sample read as number `at` on rank `rank` does what `act` says."""

    act = ""
    at = 0
    rank = 0
    _read = 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = type(self)
        kind._read += 1
        if kind._read == kind.at and os.environ["RANK"] == str(kind.rank):
            getattr(self, kind.act)()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randint(3, (), generator=generator)

    def write_stop_file(self) -> None:
        Path(os.environ["SLURMDDP_RUN_DIR"], "stop").touch()

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def work(folder: str, act: str, at: int, rank: int, environ: dict[str, str]) -> int:
    """Run a worker in which `act` happens when sample `at` is read on `rank`; return its exit code."""
    os.environ.update({"SLURMDDP_RUN_DIR": folder, "SLURMDDP_ATTEMPT": "0", **environ})
    Countdown.act, Countdown.at, Countdown.rank = act, at, rank
    return worker.main(folder)
