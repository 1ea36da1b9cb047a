"""A model that can kill its rank in a step, and data with a sample that never arrives."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from support.distributed.exact_jobs import Blurred, Noisy


class Falling(Noisy):
    """Model that kills its rank at the step in FALLS: `{restart count: [rank, step of that process]}`.

    With FALL=stop it sleeps instead, and with FALL=term it sends SIGTERM to its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        falls = json.loads(os.environ.get("FALLS", "{}"))
        rank, self._last = falls.get(os.environ["SLURMDDP_RESTART_COUNT"], [-1, 0])
        self._steps = 0 if rank == int(os.environ["RANK"]) else -(10**9)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        for thread in threading.enumerate():
            if thread.name == "slurmddp-memory":  # No state is held before its memory is there.
                thread.join()

        self._steps += self.training
        if self._steps == self._last > 0:
            if os.environ.get("FALL") == "stop":
                print("asleep", flush=True)
                time.sleep(3600)

            os.kill(os.getpid(), signal.SIGTERM if os.environ.get("FALL") == "term" else signal.SIGKILL)

        return super().forward(samples)


class Hanging(Blurred):
    """Data set whose read number HANG_AT in each process of the ranks HANG_RANKS takes an hour."""

    _read = 0

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self._read += 1
        hangs = os.environ["RANK"] in os.environ.get("HANG_RANKS", "").split(",")
        if hangs and self._read == int(os.environ["HANG_AT"]):
            Path(os.environ["SLURMDDP_RUN_DIR"], f"hangs-{os.environ['RANK']}").touch()
            time.sleep(3600)

        return super().__getitem__(index)
