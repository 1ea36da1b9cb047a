"""The data that ranks exchange when each node copies a state."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.checkpoint.state.staging import Snapshot
from slurmddp.collectives import values as collectives
from slurmddp.collectives.values import pack, unpack
from slurmddp.training.checkpointing import checkpointer as saving
from slurmddp.training.checkpointing.snapshot_interval import SnapshotInterval


class Holder:
    """Records the snapshot of a rank that copies states for its node."""

    copies_state = has_copies_elsewhere = True
    optional = staticmethod(nullcontext)

    def copy_to_memory(self, snapshot: Snapshot, shards: object) -> None:
        self.state = snapshot.state


def copy_as(
    rank: int, averages: float, before: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """Copy a state as that rank, after the messages `before` of other ranks; return its message and copy."""
    model, sent, holder = nn.BatchNorm1d(3), [], Holder()
    for average in (model.running_mean, model.running_var):
        assert average is not None
        average.fill_(averages)

    def gather(value: Any, error: Exception | None) -> list[Any]:
        assert error is None
        sent.append(unpack(pack(value)))
        return [*before, sent[-1]]

    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "gather", gather)
    checkpointer = saving.Checkpointer(
        loaders=[SimpleNamespace(state_dict=lambda: {"epoch": rank}, rank_state=lambda: None)],  # type: ignore[list-item]
        unwrap=lambda module: module,
        seed=0,
        config=None,
        saves=holder,  # type: ignore[arg-type]
        pace=SnapshotInterval(has_agent=True),
    )
    checkpointer.copy_to_memory(Path("/root"), 3, {"model": model, "plain": {"best": torch.ones(1)}})
    return sent[0], holder.state


def test_ranks_get_no_tensors_of_a_device_that_they_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    message, first = copy_as(0, 7.0, [], monkeypatch)
    assert message[1][2]["objects"]["model"]["running_mean"].device.type == "cpu"
    assert "weight" not in message[1][2]["objects"]["model"], "it is the same on all ranks"
    _, other = copy_as(1, 8.0, [message], monkeypatch)
    for state in (first, other):
        assert state["objects"]["model"]["running_mean"].tolist() == [7.0] * 3
        assert state["objects"]["model"]["weight"].tolist() == [1.0] * 3
        assert state["objects"]["plain"]["best"].tolist() == [1.0]
        assert state["loaders"] == [{"epoch": 0}]
