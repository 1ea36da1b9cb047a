"""Find out when a run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import status
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.paced_client import LONGEST_PAUSE_S

_ASK_EVERY_S = 30.0
"""Seconds between two queries; only SLURM knows the end of a run that recorded none."""


def end_of(
    folder: RunFolder, slurm: SlurmClient, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return a function that returns whether the run has ended.

    The function queries SLURM at most every `_ASK_EVERY_S`, and blocks until SLURM answers. While the state
    of the run is unknown, the pause between queries doubles, up to `LONGEST_PAUSE_S`.

    Args:
        folder: the run folder.
        slurm: the client for queries to SLURM.
        clock: returns a monotonic time in seconds.
    """
    asked_at: float | None = None
    pause = _ASK_EVERY_S

    def has_ended() -> bool:
        nonlocal asked_at, pause
        history = read_history(folder)
        open_attempt = history.newest is not None and history.newest.is_open
        if history.settled and not open_attempt:
            return True
        if asked_at is not None and clock() - asked_at < pause:
            return False

        run_status = status(folder, slurm)
        asked_at = clock()
        if run_status.state == "unknown":
            pause = min(2 * pause, LONGEST_PAUSE_S)
        else:
            pause = _ASK_EVERY_S
        return not run_status.active

    return has_ended
