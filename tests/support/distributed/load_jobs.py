"""Rank programs of test_restore: loads of checkpoints that do not fit, or that not all ranks see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.files import visibility
from slurmddp.errors import SlurmddpError
from slurmddp.training.distributon import Distributon
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
