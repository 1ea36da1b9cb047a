"""Rank programs of test_rank_main, and the user programs that it runs."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from typing import Any

from slurmddp.errors import StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training import rank_main
from slurmddp.training.distributon import Distributon


def work(folder: str) -> tuple[int, str]:
    """Run a worker; return its exit code and what it wrote."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        code = rank_main.main(folder)
    return code, errors.getvalue()


def program_that_notes(
    distributon: Distributon, config: dict[str, Any], folder: RunFolder, **options: Any
) -> None:
    distributon.print(f"seed {config['seed']} in {folder.name} with {options} on {distributon.world_size}")


def program_that_fails(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    raise ZeroDivisionError("all of it")


def program_that_is_told_to_stop(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    while not distributon.should_stop():
        time.sleep(0.01)
    raise StoppedAtCheckpoint("Enough.", hint="Again.")
