"""Each sample is read once, steps are the same on any number of ranks, and any step can be resumed."""

import itertools
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.data.permutation import Permutation
from slurmddp.training.data.sampler import RankSampler, shard_range


def ranks(world_size, n, **options):
    return [RankSampler(n, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def global_batches(orders, batch_size):
    """Return the multisets of samples that all ranks together train per step."""
    steps = itertools.zip_longest(*[batches(list(order), batch_size) for order in orders], fillvalue=[])
    return [sorted(itertools.chain(*parts)) for parts in steps]


def batches(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


def test_a_billion_samples_take_next_to_no_memory():
    tracemalloc.start()
    order = RankSampler(10**9, rank=5, world_size=64, batch_size=8, seed=1)
    head = list(itertools.islice(order, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(head)) == 10_000
    assert peak < 2 << 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [48, 50, 97, 5001])
def test_an_epoch_is_exactly_once(n, world_size):
    full = Counter(itertools.chain(*ranks(world_size, n, batch_size=4, drop_last=False)))
    assert full == Counter(range(n))
    orders = ranks(world_size, n, batch_size=4)
    dropped = Counter(itertools.chain(*orders))
    assert set(dropped.values()) == {1}
    assert sum(dropped.values()) == n // (4 * world_size) * 4 * world_size
    assert len({len(order) for order in orders}) == 1, "all ranks make equally many steps"
    assert [len(list(order)) for order in orders] == [len(order) for order in orders]


@pytest.mark.parametrize("start", [0, 24, 50])
@pytest.mark.parametrize("n", [50, 51, 53])
def test_t6_even_ranks_get_equally_many_samples(n, start):
    samplers = ranks(4, n, drop_last=False, even=True)
    for sampler in samplers:
        sampler.seek(2, start)
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {(n - start) // 4}
    assert {sampler.samples_left() for sampler in samplers} == {(n - start) // 4}
    kept = start + (n - start) // 4 * 4
    assert Counter(itertools.chain(*parts)) == Counter(Permutation(n, 0, 2).block(start, kept).tolist())


def test_global_batches_do_not_depend_on_the_world_size():
    expected = global_batches(ranks(1, 1000, batch_size=24, seed=3), 24)
    for world_size in (2, 3, 4, 6, 8, 24):
        orders = ranks(world_size, 1000, batch_size=24 // world_size, seed=3)
        assert global_batches(orders, 24 // world_size) == expected


def test_t6_epochs_differ_and_repeat():
    order = RankSampler(100, seed=1)
    first = list(order)
    assert list(order) == first
    order.seek(1, 0)
    assert list(order) != first
    order.seek(0, 0)
    assert list(order) == first


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps", range(13))
def test_a_resume_after_any_step_gives_the_rest_of_the_epoch(steps, shuffle):
    options = {"batch_size": 4, "seed": 2, "shuffle": shuffle}
    for whole, resumed in zip(ranks(2, 100, **options), ranks(2, 100, **options), strict=True):
        whole.seek(3, 0)
        samples = list(whole)
        for _ in range(steps):
            whole.advance(whole.global_batch_size)
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == samples[steps * 4 :]
        assert len(resumed) == len(samples) - steps * 4


def test_state_counts_trained_samples_not_fetched_ones():
    order = RankSampler(1000, batch_size=10)
    order.seek(0, 30)
    fetched = list(itertools.islice(order, 500))
    iterator = iter(order)
    assert [next(iterator) for _ in range(500)] == fetched
    assert order.state_dict()["position"] == 30
    order.advance(10)
    assert order.state_dict()["position"] == 40
    iter(order)
    assert order.position == 30, "it begins again where the last seek was"
    order.advance(5000)
    assert order.position == 1000, "the last batch may be smaller"


@pytest.mark.parametrize(
    "other", [{"samples": 99}, {"seed": 2}, {"shuffle": False}, {"samples": None}], ids=str
)
def test_other_data_is_refused(other):
    """A position of a user's sampler holds no number of samples."""
    sampler = RankSampler(100, seed=1)
    state = {key: value for key, value in (sampler.state_dict() | other).items() if value is not None}
    with pytest.raises(MismatchError, match="data order"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"batch_size": 0},
        {"world_size": 4, "batch_size": 3},
        {"n": 0, "drop_last": False},
    ],
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ConfigError):
        RankSampler(wrong.pop("n", 10), **wrong)


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (0, 11)])
def test_impossible_positions_are_refused(epoch, position):
    with pytest.raises(ConfigError):
        RankSampler(10).seek(epoch, position)


@given(n=st.integers(0, 1000), world_size=st.integers(1, 20))
def test_shard_ranges_are_even_and_disjoint(n, world_size):
    shares = [shard_range(n, rank, world_size) for rank in range(world_size)]
    assert list(itertools.chain(*shares)) == list(range(n))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
