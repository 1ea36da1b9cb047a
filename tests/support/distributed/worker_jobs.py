"""Runs of one rank with a user's program, the programs, and the rank that runs them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from typing import Any

from slurmddp.errors import StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training import rank_main
from slurmddp.training.distributon import Distributon


def write_config(folder: RunFolder, **config: Any) -> None:
    """Write the configuration of a run of one rank, by default with `program_that_notes`."""
    program = {"_target_": "support.distributed.worker_jobs.program_that_notes"}
    base = {"seed": 3, "nodes": 1, "ranks_per_node": 1, "program": program}
    folder.config_file.write_text(json.dumps({**base, **config}))


def work(folder: str) -> tuple[int, str]:
    """Run a worker; return its exit code and its output."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        code = rank_main.main(folder)
    return code, errors.getvalue()


def program_that_notes(
    distributon: Distributon, config: dict[str, Any], folder: RunFolder, **options: Any
) -> None:
    distributon.print(f"seed {config['seed']} in {folder.name} with {options} on {distributon.world_size}")
    distributon.print(f"by {type(distributon._strategy).__name__}")


def program_that_fails(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    raise ZeroDivisionError("all of it")


def program_that_is_told_to_stop(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    while not distributon.should_stop():
        time.sleep(0.01)
    raise StoppedAtCheckpoint("Enough.", hint="Again.")
