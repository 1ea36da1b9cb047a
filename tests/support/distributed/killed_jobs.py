"""The model of test_restart_in_place: its rank may be ordered to die in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import torch

from support.distributed.exact_jobs import Noisy


class Falling(Noisy):
    """Kills its rank as FALLS, `{generation: [rank, training step of that process]}`, says.

    With FALL=stop it sleeps instead.
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
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(samples)
