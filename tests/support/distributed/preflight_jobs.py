"""Ranks that run a preflight; one of them may have a fault."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder import measure_files
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.distributon import Distributon
from slurmddp.training.preflight import checks, pairs, preflight, verdicts
from slurmddp.training.preflight.checks import CheckContext, NodeFault
from support.runs import measuring_host

LIMIT_S = 0.5
"""Seconds until an action that never ends is abandoned; no healthy action has to end within them."""

SHORT_S = 0.1
"""Seconds until a change that a node never sees counts as not seen; the others are seen at the first look."""


def fly(folder: str, config: dict[str, Any] | None = None, **options: Any) -> tuple[str, int, str]:
    """Take part in a preflight; return its error's kind, exit code and message."""
    os.environ["SLURMDDP_ATTEMPT"] = "0"
    with Distributon() as d:
        d.launch()
        # Give names to the emulated nodes, as on a cluster.
        context = d._session.context
        names = tuple(f"n{node + 1}" for node in range(context.info.nodes))
        context = replace(context, info=replace(context.info, hosts=names, emulated=False))

        try:
            preflight.run(context, RunFolder(folder), config or {}, **options)
        except SlurmddpError as error:
            return type(error).__name__, error.exit_code, str(error)

        return "", 0, ""


def _is_me(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def with_a_bad_device(folder: str, rank: int, hours: int) -> tuple[str, int, str]:
    """Let the device of one rank calculate wrongly."""
    if _is_me(rank):
        checks.multiplies_right = lambda on, kind: False
    return fly(folder, {"policy": {"exclude_failed_h": hours}})


def with_a_device_that_hangs(folder: str, rank: int) -> tuple[str, int, str]:
    def device(context: CheckContext) -> list[NodeFault]:
        time.sleep(3600)
        return []

    if _is_me(rank):
        return fly(folder, checks=(device,), check_s=LIMIT_S)

    return fly(folder)


def with_a_check_that_raises(folder: str, rank: int) -> tuple[str, int, str]:
    def device(context: CheckContext) -> list[NodeFault]:
        raise MemoryError("no more of it")

    return fly(folder, checks=(device,)) if _is_me(rank) else fly(folder)


def with_a_full_run_disk(folder: str) -> tuple[str, int, str]:
    checks.free_bytes = lambda path: 17 if path == Path(folder) else 1 << 40
    return fly(folder)


def with_tmpdir(folder: str, rank: int, named: str) -> tuple[str, int, str]:
    if _is_me(rank):
        os.environ["TMPDIR"] = named
    return fly(folder)


def with_a_full_tmp(folder: str, rank: int, full: str) -> tuple[str, int, str]:
    """Give one rank no TMPDIR and a full /tmp; Python itself would fall back to /var/tmp."""
    if _is_me(rank):
        os.environ.pop("TMPDIR", None)
        checks.TMP = Path(full)

    return fly(folder)


def with_a_silent_node(folder: str, node: int) -> tuple[str, int, str]:
    if os.environ["NODE_RANK"] == str(node):
        pairs.exchange = lambda peer, device: time.sleep(3600)
    return fly(folder, pair_s=LIMIT_S)


def with_a_node_that_damages(folder: str, node: int) -> tuple[str, int, str]:
    """Let one node send wrong numbers."""
    vector = pairs._vector
    bad = os.environ["NODE_RANK"] == str(node)

    def damaged(rank: int, device: torch.device) -> torch.Tensor:
        return vector(rank, device) + (bad and rank == int(os.environ["RANK"]))

    pairs._vector = damaged
    return fly(folder)


def with_a_clock(folder: str, rank: int, ahead_s: float, refused_s: float) -> tuple[str, int, str]:
    """Set the clock of one rank's node, so far off that no slow machine hides it."""
    verdicts.SKEW_REFUSED_S = refused_s
    if _is_me(rank):
        now = time.time
        time.time = lambda: now() + ahead_s

    return fly(folder)


def with_a_faulty_file_system(folder: str, rank: int, fault: str) -> tuple[str, int, str]:
    """Give the node of one rank a file system with a fault of `measuring_host`."""
    if _is_me(rank):
        measuring_host.FAULTS[fault]()
    return fly(folder, seen_s=SHORT_S)


def with_a_node_that_can_not_write(folder: str, rank: int) -> tuple[str, int, str]:
    def create(file: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    if _is_me(rank):
        measure_files.LOOKS = {
            look: steps._replace(change=create) for look, steps in measure_files.LOOKS.items()
        }
    return fly(folder, seen_s=SHORT_S)


def exchanged_through_the_cpu() -> str | None:
    """Exchange numbers with the other rank for a device whose tensors the group can't send, as a GPU's."""
    with Distributon() as d:
        d.launch()
        pairs.copied_devices = lambda: {"meta"}
        return pairs.exchange(1 - d.rank, torch.device("meta"))
