"""Decide how long the scripts beside this file train, and record their steps.

The first attempt takes a few steps and waits, so that all ranks get the signal in the same step: some
frameworks start a collective in their handlers. A later attempt trains a few steps from the saved step on.
"""

import os
import time
from pathlib import Path

FOLDER = Path(os.environ["SLURMDDP_RUN_DIR"], "own")
FOLDER.mkdir(exist_ok=True)
RANK = os.environ["RANK"]
WAITS_AT = 4


def last_step(first: int) -> int:
    """Return the step at which a training that begins at `first` ends."""
    return first + 3 if first else 1_000_000


def taken(step: int) -> None:
    """Record a step of this rank; from step WAITS_AT on, wait until the test creates the file `go`."""
    with (FOLDER / f"steps-{RANK}").open("a") as stream:
        stream.write(f"{step}\n")
    while step >= WAITS_AT and not (FOLDER / "go").exists():
        time.sleep(0.02)
