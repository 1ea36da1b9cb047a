"""Decide how long the framework scripts beside this file train, and record which ranks have finished."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["SLURMDDP_RUN_DIR"], "own")
FOLDER.mkdir(exist_ok=True)
ATTEMPT = int(os.environ["SLURMDDP_ATTEMPT"])
IS_LASTING = ATTEMPT == 0 and "SLURMDDP_EMULATED" not in os.environ
"""Whether this attempt trains until it is interrupted, as the first attempt on SLURM does."""


def last_step(first: int) -> int:
    """Return the step at which a training that begins at `first` ends."""
    return 1_000_000 if IS_LASTING else first + 4


def pace() -> None:
    """Sleep half a second for each step of an attempt that trains until it is interrupted."""
    time.sleep(0.5 if IS_LASTING else 0)


def record(rank: int, local_rank: int, world_size: int, first: int, last: int) -> None:
    """Write the place of a rank that has finished, with its first and last step."""
    (FOLDER / f"rank-{rank}").write_text(json.dumps([rank, local_rank, world_size, first, last]))
