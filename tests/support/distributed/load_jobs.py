"""Rank programs of test_restore: loads of checkpoints that do not fit, or that not all ranks see."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.files import visibility
from slurmddp.checkpoint.files.manifest import folder_name
from slurmddp.errors import SlurmddpError
from slurmddp.training.distributon import Distributon
from support.distributed.checkpoint_files import flip_bit, steps_in
from support.distributed.rank_jobs import Net, weights


def _said_by(attempt: Any) -> str:
    try:
        attempt()
    except SlurmddpError as error:
        return str(error)

    return ""


def load_that_one_rank_refuses(root: str) -> dict[str, Any]:
    """Return each rank's error if only rank 1 has another model, and whether its model is unchanged."""
    with Distributon(seed=1) as d:
        d.launch()
        d.save(1, root=root, model=d.setup_model(Net()))
        torch.manual_seed(5)
        model = Net() if d.rank == 0 else Net(width=5)
        before = weights(model)
        message = _said_by(lambda: d.load(root=root, model=model))
        after = weights(model)
        return {"said": message, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def load_from_an_own_folder(root: str) -> str:
    """Return each rank's error if the folders differ and only rank 0's folder has a checkpoint."""
    visibility.WAITS_S = (0.01, 0.02)
    with Distributon(seed=1) as d:
        d.launch()
        d.save(1, root=Path(root, "0"), progress={})
        return _said_by(lambda: d.load(root=Path(root, str(d.rank)), progress={}))


def load_checkpoints_damaged_on_one_host(root: str, damaged: dict[int, str]) -> dict[str, Any]:
    """Save steps 1 to 3, damage a file of some steps for rank 1 alone, load, and save step 3.

    Args:
        root: holds a folder of checkpoints for each rank; the folders stand for what two hosts read.
        damaged: by step, the file of which rank 1 reads another byte.

    Returns:
        The rank's error; the step that `load` returned, and the loaded value; the steps in rank 0's folder at
        the end.
    """
    visibility.WAITS_S = (0.01, 0.02)
    of_zero = Path(root, "0")
    own = Path(root, "1") if int(os.environ["RANK"]) else of_zero
    loaded: list[int | None] = []
    progress: dict[str, int] = {}
    with Distributon(seed=1) as d:
        d.launch()
        for step in (1, 2, 3):
            d.save(step, root=of_zero, progress={"at": step})
        if own != of_zero:
            shutil.copytree(of_zero, own)
        for step, name in damaged.items():
            if own != of_zero:
                flip_bit(own / folder_name(step) / name)

        error = _said_by(lambda: loaded.append(d.load(root=own, progress=progress)))
        if not error:
            d.save(3, root=own, progress={"at": 3})

    return {"error": error, "loaded": loaded, "progress": progress, "steps": steps_in(of_zero)}
