"""Random states after a load, on the same number of ranks and on another."""

from __future__ import annotations

import pytest
import torch

from slurmddp.checkpoint.state import Checkpoint
from slurmddp.collectives import values as collectives
from slurmddp.training import rng
from slurmddp.training.checkpointing.training_state import restore_randomness


def drawn_after(found: Checkpoint, seed: int = 7, rank: int = 0) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "rank", lambda: rank)
        restore_randomness(found, seed)
    return torch.rand(3).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_states_are_restored_on_the_same_number_of_ranks_only(ranks: int) -> None:
    saved = rng.capture()
    draws = torch.rand(3).tolist()
    found = Checkpoint(3, {"rng": [saved] * ranks}, {})
    first = drawn_after(found)
    assert first == drawn_after(found)
    assert (first == draws) is (ranks == 1)
    assert (first == drawn_after(found, seed=8)) is (ranks == 1), "others follow from the seed"


def test_random_states_of_another_number_of_ranks_differ_by_rank_and_step() -> None:
    saved = [rng.capture()] * 2
    draws = [
        drawn_after(Checkpoint(step, {"rng": saved}, {}), rank=rank) for step in (3, 4) for rank in (0, 1)
    ]
    assert len(set(map(tuple, draws))) == 4
