"""Rank programs of test_fails_alone: one rank fails within a save or a load, and the others continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from slurmddp.checkpoint.state.staging import Snapshots
from slurmddp.training.checkpointing import checkpointer, restore
from slurmddp.training.checkpointing.async_writer import AsyncWriter
from slurmddp.training.distributon import Distributon
from support.distributed.memory_jobs import Loop

_PLACES: dict[str, tuple[Any, str, int]] = {
    "save": (checkpointer, "of_this_rank", 1),
    "test_save": (checkpointer, "of_this_rank", 1),
    "memory_save": (checkpointer, "of_this_rank", 1),
    "memory_save, collect": (checkpointer, "collect", 0),
    "load, look": (AsyncWriter, "held", 1),
    "load, give": (restore, "restore_data", 1),
    "load, after": (AsyncWriter, "prepare", 1),
    "load, forget": (AsyncWriter, "went_on_from", 1),
}


def raise_in_each_place(root: str) -> dict[str, str]:
    """Return what this rank hears when another one, or it alone, fails in each place of a save or load."""
    said: dict[str, str] = {}
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        d.save(root, 1, **loop.objects)
        actions: dict[str, Callable[[], Any]] = {
            "save": lambda: d.save(root, 2, **loop.objects),
            "test_save": lambda: d.test_save(root, **loop.objects),
            "memory_save": lambda: d.memory_save(root, 2, **loop.objects),
            "load": lambda: d.load(root, **loop.objects),
        }
        for name, (owner, function, rank) in _PLACES.items():
            with patch.object(owner, function, _raising(getattr(owner, function), rank == d.rank, name)):
                try:
                    actions[name.partition(",")[0]]()
                except Exception as error:
                    said[name] = f"{type(error).__name__}: {error}"
        said["all_reduce"] = str(d.all_reduce_mean(torch.tensor(float(d.rank))).item())
    return said


def _raising(real: Callable[..., Any], raises: bool, name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if raises:
            raise RuntimeError(f"only here, in {name}")
        return real(*args, **options)

    return call


def load_from_memory(root: str, place: str) -> tuple[int | None, str | None]:
    """Load what rank 0 holds in memory, where `place` fails on one rank; return step and source."""
    owner, function, rank = {
        "none": (restore, "_read", -1),
        "read": (restore, "_read", 1),
        "send": (restore.shared_buffer, "mapped", 0),
    }[place]
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        d.save(root, 1, **loop.objects)
        _keep_in_memory(d, loop, root, 2)
        held = d._checkpointer.saves.held(Path(root))  # Found before the memory can't be read any more.
        failing = patch.object(owner, function, _raising(getattr(owner, function), rank == d.rank, place))
        with patch.object(Snapshots, "newest", lambda *_: held), failing:
            step = d.load(root, **loop.objects)
        return step, d.resumed_from


def _keep_in_memory(d: Distributon, loop: Loop, root: str, step: int) -> None:
    d.memory_save(root, step, **loop.objects)
    d._checkpointer.saves._snapshots._join()  # The first time, the memory is taken beside the training.
    d.memory_save(root, step, **loop.objects)


def copy_that_fails_on_one_rank(root: str) -> list[bool]:
    """Copy twice, on each rank, where rank 1 can not take in what rank 0 shares; say what each rank holds."""
    with Distributon(seed=1) as d:
        loop = Loop(d.launch())
        saves = d._checkpointer.saves
        saves.holds = saves.spreads = True
        with patch.object(checkpointer, "_overlay", _raising(checkpointer._overlay, d.rank == 1, "overlay")):
            _keep_in_memory(d, loop, root, 1)

        return [saves.held(Path(root)) is not None, saves._refused]
