"""Rank programs of test_sharded: all ranks write one checkpoint with torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint as sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.digest import FileRecord, record_of
from slurmddp.collectives import values as collectives
from slurmddp.training.distributon import Distributon


def whole(step: int) -> torch.Tensor:
    return torch.arange(1000.0).reshape(100, 10) + step


def write_sharded(root: str, steps: list[int]) -> list[str]:
    """Save one tensor, half of it on each of two ranks, as the checkpoint of each step."""
    with Distributon() as d:
        mesh = init_device_mesh("cpu", (d.launch().world_size,))
        return [
            _write(d, Path(root), step, distribute_tensor(whole(step), mesh, [Shard(0)])) for step in steps
        ]


def _write(d: Distributon, root: Path, step: int, tensor: torch.Tensor) -> str:
    def fill(folder: Path) -> dict[str, FileRecord]:
        sharded.save({"w": tensor}, checkpoint_id=collectives.from_zero(str(folder)))
        return {file.name: record_of(file) for file in folder.iterdir()}

    path = ""
    if d.is_global_zero:
        path = str(checkpoint.publish(root, step, fill, meta={"world_size": d.world_size}, keep_last=3))
    else:
        sharded.save({"w": tensor}, checkpoint_id=collectives.from_zero(""))

    return str(collectives.from_zero(path))
