"""Sandboxes that tests start, and functions that lose nodes and restore all nodes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.hostlist import expand
from slurmddp.errors import SlurmddpError
from support.slurm import stub_runs, train_project
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.versions import by_version

_mount: dict[str, Any] = {}
"""The sizes of all sandboxes that describe the mount of pytest's option --shared."""


def mount_everywhere(kind: str, folder: Path) -> None:
    """Let the nodes of all sandboxes made from now on mount a folder."""
    _mount.update(shared=kind, shared_folder=folder)


@contextmanager
def own_sandbox(letter: str, nodes: int, **options: Any) -> Iterator[FaultySandbox]:
    """Yield a running SLURM.

    Each file of tests uses another `letter` for its sandbox; sockets need short paths.
    """
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as folder:
        made = FaultySandbox(
            f"{letter}{os.getpid()}", root=Path(folder) / "sandbox", nodes=nodes, **{**_mount, **options}
        )
        try:
            made.up()
        except SlurmddpError as error:
            pytest.fail(f"{error.message} {error.hint}", pytrace=False)

        try:
            yield made
        finally:
            made.down()


def bring_back(used: FaultySandbox, timeout_s: float = 180) -> None:
    """Cancel all jobs, restore the nodes that were killed or cut off, and wait until each can take a job."""
    assert used.cancel_jobs(), f"jobs that can't be cancelled: {used.jobs()}"
    for node in used.nodes:
        used.restore_node(node)
    deadline = time.monotonic() + timeout_s
    while set((states := used.status().nodes).values()) != {"idle"}:
        assert time.monotonic() < deadline, f"nodes did not come back: {states}"
        time.sleep(0.1)


def shortest_timeout_s() -> int:
    """Return the shortest SlurmdTimeout in seconds at which SLURM gives up dead nodes only.

    With 10 s, SLURM 24.11 gave up a live node together with a dead one in one of eight trials.
    """
    return by_version(10, 30)


def lose(used: FaultySandbox, node: str) -> None:
    """Make SLURM lose a node whose processes continue to run."""
    if used.plan.namespaces:
        used.cut_link(node)
    else:
        used.kill_node(node)


def nodes_of(run: stub_runs.Run | train_project.Run, attempt: int) -> list[str]:
    """Return the nodes on which an attempt has started."""
    return list(expand(run.events("started")[attempt]["nodes"]))
