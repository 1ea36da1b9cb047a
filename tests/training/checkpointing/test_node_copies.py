"""What ranks tell each other when each node copies a state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.checkpoint.state.packed import pack, unpack
from slurmddp.training.checkpointing import checkpointer as saving
from slurmddp.training.checkpointing.snapshot_interval import SnapshotInterval
from slurmddp.training.process_group import collectives


class Holder:
    """Holds what a rank keeps, as the first rank of one of several nodes does."""

    holds = spreads = True
    optional = staticmethod(nullcontext)

    def keep(self, root: Path, step: int, stamp: int, state: Mapping[str, Any], meta: Any) -> None:
        self.state = state


def keep(rank: int, averages: float, before: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Keep a state as that rank, after what ranks `before` it have told; return what it told and kept."""
    model, told, holder = nn.BatchNorm1d(3), [], Holder()
    for average in (model.running_mean, model.running_var):
        assert average is not None
        average.fill_(averages)

    def gather(value: Any, error: Exception | None) -> list[Any]:
        assert error is None
        told.append(unpack(pack(value)))
        return [*before, told[-1]]

    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "gather", gather)
    checkpointer = saving.Checkpointer(
        loaders=[],
        unwrap=lambda module: module,
        seed=0,
        config=None,
        saves=holder,  # type: ignore[arg-type]
        pace=SnapshotInterval(keeps=True),
    )
    checkpointer.keep_in_memory(Path("/root"), 3, {"model": model, "plain": {"best": torch.ones(1)}})
    return told[0], holder.state


def test_ranks_get_no_tensors_of_a_device_that_they_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    told, first = keep(0, 7.0, [], monkeypatch)
    assert told[1][2]["objects"]["model"]["running_mean"].device.type == "cpu"
    assert "weight" not in told[1][2]["objects"]["model"], "it is the same on all ranks"
    _, other = keep(1, 8.0, [told], monkeypatch)
    for state in (first, other):
        assert state["objects"]["model"]["running_mean"].tolist() == [7.0] * 3
        assert state["objects"]["model"]["weight"].tolist() == [1.0] * 3
        assert state["objects"]["plain"]["best"].tolist() == [1.0]
