"""The configuration of a small training by the shipped trainer, and a run folder that holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurmddp.runs.folder import RunFolder


def trainer_config(data: dict[str, Any], train: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what a training of `rank_jobs.Net` computes, with other parts where `changes` name them."""
    return {
        "seed": 0,
        "train": train,
        "data": data,
        "model": {"_target_": "rank_jobs.Net"},
        "loss": {"_target_": "slurmddp.training.trainer.token_cross_entropy", "_partial_": True},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
        "scheduler": None,
        "strategy": {"name": "ddp"},
        "program": {"_target_": "slurmddp.training.trainer.train"},
        **changes,
    }


def make_run(path: Path, ranks: int, config: dict[str, Any]) -> RunFolder:
    """Make a run folder for `ranks` ranks on one node."""
    path.mkdir()
    folder = RunFolder(path)
    folder.config_file.write_text(json.dumps({**config, "nodes": 1, "ranks_per_node": ranks}))
    return folder
