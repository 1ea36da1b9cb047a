"""A small training by the shipped trainer: its configuration, a run folder that holds one, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder


def trainer_config(data: dict[str, Any], train: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the configuration of a training of `rank_jobs.Net`, with `changes`."""
    return {
        "seed": 0,
        "train": train,
        "data": data,
        "model": {"_target_": "support.distributed.rank_jobs.Net"},
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


def new_folder(path: Path) -> RunFolder:
    path.mkdir()
    return RunFolder(path)


def final_state(folder: RunFolder) -> dict[str, Any]:
    newest = checkpoint.latest(folder.checkpoints_dir)
    assert newest is not None
    return checkpoint.read(newest).state


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{index}")
    else:
        assert a == b, where


def curve(folder: RunFolder) -> dict[tuple[int, str], Any]:
    """Return the lines that count for a reader: of each kind, the last line of each step."""
    lines: dict[tuple[int, str], Any] = {}
    for line in read_lines(folder.metrics_file):
        kind = "eval_loss" if "eval_loss" in line else "loss"
        lines[line["step"], kind] = (line[kind], line.get("lr"))

    return lines
