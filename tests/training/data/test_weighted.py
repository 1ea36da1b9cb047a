"""Weighted draws follow the weights, on any number of ranks, and resume after a stop."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data import WeightedRandomSampler

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.data import weighted
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.loader import SampledLoader
from slurmddp.training.data.weighted import WeightedSampler
from support.loaders import loader_of

WEIGHTS = [0.0, 1.0, 2.0, 0.0, 5.0, 2.0, 0.0]


def counts(order: WeightedSampler) -> np.ndarray:
    return np.bincount(list(order), minlength=len(WEIGHTS))


def test_samples_come_in_proportion_to_their_weights() -> None:
    n = 50_000
    found = counts(WeightedSampler(n, WEIGHTS, seed=3))
    assert found[[0, 3, 6]].tolist() == [0, 0, 0]
    expected = n * np.array(WEIGHTS)[[1, 2, 4, 5]] / 10
    chi_square = float(((found[[1, 2, 4, 5]] - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # one in a thousand, of 3 degrees of freedom


def test_pairs_of_draws_are_independent() -> None:
    draws = list(WeightedSampler(40_000, [1.0, 3.0], seed=1))
    pairs = Counter(itertools.pairwise(draws))
    expected = {(a, b): 40_000 * (0.25, 0.75)[a] * (0.25, 0.75)[b] for a in (0, 1) for b in (0, 1)}
    assert sum((pairs[pair] - want) ** 2 / want for pair, want in expected.items()) < 16.3


def test_without_replacement_heavy_samples_come_early_and_no_sample_twice() -> None:
    firsts = Counter()
    for seed in range(2000):
        order = list(WeightedSampler(4, WEIGHTS, replacement=False, seed=seed))
        assert sorted(order) == [1, 2, 4, 5]
        firsts[order[0]] += 1
    assert abs(firsts[4] / 2000 - 0.5) < 0.05
    assert abs(firsts[1] / 2000 - 0.1) < 0.03


@pytest.mark.parametrize("replacement", [True, False])
def test_the_draws_do_not_depend_on_the_world_size(replacement: bool) -> None:
    weights = np.arange(1, 101).tolist()
    options: dict[str, Any] = {"replacement": replacement, "seed": 2, "drop_last": False}
    whole = list(WeightedSampler(60, weights, **options))
    for world_size in (2, 3, 4):
        parts = [
            list(WeightedSampler(60, weights, rank=rank, world_size=world_size, **options))
            for rank in range(world_size)
        ]
        assert [parts[at % world_size][at // world_size] for at in range(60)] == whole
    later = WeightedSampler(60, weights, **options)
    later.seek(0, 37)
    assert list(later) == whole[37:]
    later.seek(1, 0)
    assert list(later) != whole


def test_the_draws_never_change_between_versions() -> None:
    for replacement, expected in ((True, [4, 2, 2, 1]), (False, [4, 2, 1, 5])):
        order = WeightedSampler(4, WEIGHTS, replacement=replacement, seed=1)
        order.seek(2, 0)
        assert list(order) == expected


def test_keys_hold_epoch_and_position_on_any_rank() -> None:
    options: dict[str, Any] = {"world_size": 2, "seed": 1, "drop_last": False}
    for rank in range(2):
        order = WeightedSampler(9, WEIGHTS, rank=rank, keyed=True, **options)
        order.seek(3, 4)
        assert [key[1:] for key in order] == [(3, position) for position in range(4 + rank, 9, 2)]


def test_a_number_at_a_boundary_draws_the_sample_that_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of 0 never draws a first sample without weight."""
    monkeypatch.setattr(
        weighted, "_uniform", lambda at, seed, epoch: np.array([0.0, 0.5])[at.start : at.stop]
    )
    assert list(WeightedSampler(2, [0.0, 1.0, 1.0], seed=1)) == [1, 2]


def weighted_loader(ranks: int, rank: int, weights: list[float], **options: Any) -> DistributedLoader:
    sampler = WeightedRandomSampler(weights, 48, **options)
    data = range(len(weights))
    loader = loader_of(data, ranks=ranks, rank=rank, sampler=sampler, batch_size=12 // ranks, even=False)
    assert isinstance(loader, SampledLoader)
    return loader


def test_a_weighted_random_sampler_is_divided_and_resumes_on_other_ranks() -> None:
    weights = [1.0, 2.0, 3.0]
    whole = [sorted(batch.tolist()) for batch in weighted_loader(1, 0, weights)]
    assert len(whole) == 4
    walks = [iter(weighted_loader(4, rank, weights)) for rank in range(4)]
    assert [sorted(index for walk in walks for index in next(walk).tolist()) for _ in range(4)] == whole
    stopped = weighted_loader(2, 0, weights)
    next(walk := iter(stopped))
    rest = weighted_loader(1, 0, weights)
    rest.load_state_dict(stopped.state_dict())
    assert [sorted(batch.tolist()) for batch in rest] == whole[1:]
    del walk


@pytest.mark.parametrize(
    ("n", "weights", "options", "said"),
    [
        (4, [*WEIGHTS[:-1], 1.0], {}, "other weights"),
        (4, WEIGHTS, {"replacement": False}, "other weights"),
        (4, WEIGHTS, {"seed": 2}, "seed=1"),
        (5, WEIGHTS, {}, "samples=4"),
    ],
)
def test_a_position_among_other_draws_is_refused(
    n: int, weights: list[float], options: dict[str, Any], said: str
) -> None:
    state = WeightedSampler(4, WEIGHTS, seed=1).state_dict()
    with pytest.raises(MismatchError, match=said):
        WeightedSampler(n, weights, **{"seed": 1, **options}).load_state_dict(state)


def test_a_weighted_random_sampler_without_replacement_gives_no_sample_twice() -> None:
    loader = weighted_loader(1, 0, [1.0] * 48, replacement=False)
    assert sorted(index for batch in loader for index in batch.tolist()) == [*range(48)]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [[1.0]]])
def test_invalid_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="weights"):
        WeightedSampler(3, weights)


def test_too_many_draws_without_replacement_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 draws without replacement.*there are 4"):
        WeightedSampler(5, WEIGHTS, replacement=False)
