"""Rank programs of test_fails_alone: one rank fails within a save or a load, and no rank hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from slurmddp.checkpoint.state.staging import StagingBuffers
from slurmddp.training.checkpointing import checkpointer, restore
from slurmddp.training.checkpointing.async_writer import AsyncWriter
from slurmddp.training.distributon import Distributon
from support.distributed.memory_jobs import Loop, copy_to_memory
from support.runs.agent_runs import wait_until

_PLACES: dict[str, tuple[Any, str, int]] = {
    "save": (checkpointer, "of_this_rank", 1),
    "check_can_save": (checkpointer, "of_this_rank", 1),
    "check_can_save, write": (checkpointer.checkpoint, "check_can_write", 0),
    "memory_save": (checkpointer, "of_this_rank", 1),
    "memory_save, collect": (checkpointer, "collect", 0),
    "load, find": (AsyncWriter, "states_in_memory", 1),
    "load, choose": (restore.checkpoint, "latest", 0),
    "load, apply": (restore, "restore_data", 1),
    "load, after": (checkpointer.Checkpointer, "prepare", 1),
    "load, discard": (AsyncWriter, "discard_after", 1),
}


def raise_in_each_place(root: str) -> dict[str, str]:
    """Return the error of this rank for each place of a save or load in which one rank fails."""
    errors: dict[str, str] = {}
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        d.save(1, root=root, **loop.objects)
        actions: dict[str, Callable[[], Any]] = {
            "save": lambda: d.save(2, root=root, **loop.objects),
            "check_can_save": lambda: d.check_can_save(root=root, **loop.objects),
            "memory_save": lambda: d.memory_save(2, root=root, **loop.objects),
            "load": lambda: d.load(root=root, **loop.objects),
        }

        for name, (owner, function, rank) in _PLACES.items():
            with patch.object(owner, function, _raising(getattr(owner, function), rank == d.rank, name)):
                try:
                    actions[name.partition(",")[0]]()
                except Exception as error:
                    errors[name] = f"{type(error).__name__}: {error}"

        errors["all_reduce"] = str(d.all_reduce(torch.tensor(float(d.rank))).item())

    return errors


def _raising(real: Callable[..., Any], raises: bool, name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if raises:
            raise RuntimeError(f"only here, in {name}")
        return real(*args, **options)

    return call


def load_from_memory(root: str, place: str) -> tuple[int | None, str | None]:
    """Load the state in the memory of rank 0 while `place` fails on one rank; return step and source."""
    owner, function, rank = {
        "none": (restore, "_read", -1),
        "read": (restore, "_read", 1),
        "send": (restore.shared_buffer, "mapped", 0),
    }[place]
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        d.save(1, root=root, **loop.objects)
        copy_to_memory(d, root, 2, **loop.objects)
        copies = d._checkpointer.saves.states_in_memory(Path(root))  # before the patch breaks the memory
        failing = patch.object(owner, function, _raising(getattr(owner, function), rank == d.rank, place))
        with patch.object(StagingBuffers, "states", lambda *_: copies), failing:
            step = d.load(root=root, **loop.objects)
        return step, d.resumed_from


def copy_that_fails_on_one_rank(root: str) -> list[bool]:
    """Copy while rank 1 can't apply rank 0's part.

    Return whether this rank has a copy, and has ended its copies.
    """
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        saves = d._checkpointer.saves
        saves.copies_state = saves.has_copies_elsewhere = True
        with patch.object(checkpointer, "_overlay", _raising(checkpointer._overlay, d.rank == 1, "overlay")):
            copy_to_memory(d, root, 1, **loop.objects)
        return [bool(saves.states_in_memory(Path(root))), saves._copies_off]


def leave_by_an_error(root: str, folder: str) -> None:
    """Raise an error in the block on both ranks; rank 1 raises it only after rank 0 has left its block."""
    try:
        with Distributon(seed=1) as d:
            d.launch()
            d.save(1, root=root, wait=False, progress={"at": 1})
            if d.rank:
                wait_until(Path(folder, "left").exists, "rank 0 leaves, though rank 1 is still there")
            raise ValueError("only here")
    except ValueError:
        Path(folder, "left").touch()
