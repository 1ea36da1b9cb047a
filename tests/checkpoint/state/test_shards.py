"""Whole tensors of a sharded state: kept by ranks that write them, freed by the others."""

from __future__ import annotations

import pytest
import torch

from slurmddp.checkpoint.state import shards


@pytest.mark.parametrize("tensor", [torch.ones(1000), torch.tensor(3.0)], ids=["a vector", "a scalar"])
def test_a_rank_that_writes_no_whole_tensors_keeps_no_memory_of_them(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "is_sharded", lambda tensor: True)
    monkeypatch.setattr(shards, "entry_of", lambda tensor: None)
    monkeypatch.setattr(shards, "whole", lambda tensor: tensor)
    kept = shards.with_whole_tensors({"weight": tensor}, keep=True)["weight"]
    freed = shards.with_whole_tensors({"weight": tensor}, keep=False)["weight"]

    assert torch.equal(kept, tensor)
    assert freed.dtype == tensor.dtype
    assert freed.untyped_storage().nbytes() == 0
