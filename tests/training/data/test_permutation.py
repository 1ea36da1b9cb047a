"""The data order: a bijection for every size, the same at any world size, each sample exactly once."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.data.permutation import TABLE_SIZE, DistributedOrder, Permutation, shard_range

PRIMES = [2, 3, 5, 7, 97, 997, 4093, 4099, 10007, 65537]
POWERS = [1, 2, 4, 64, 1024, 4096, 8192, 65536]
EDGES = [TABLE_SIZE - 1, TABLE_SIZE, TABLE_SIZE + 1, 65535, 65537, 100_000]


def ranks(world_size, n, **options):
    return [DistributedOrder(n, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def global_batches(orders, batch_size):
    """Return the multisets of samples that all ranks together train per step."""
    steps = itertools.zip_longest(*[batches(list(order), batch_size) for order in orders], fillvalue=[])
    return [sorted(itertools.chain(*parts)) for parts in steps]


def batches(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


@pytest.mark.parametrize("n", sorted({*PRIMES, *POWERS, *EDGES}))
def test_a_bijection(n):
    assert np.array_equal(np.sort(Permutation(n, 7).block(0, n)), np.arange(n))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 20_000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_a_bijection_for_any_size_and_key(n, seed, epoch):
    permutation = Permutation(n, seed, epoch)
    assert np.array_equal(np.sort(permutation.block(0, n)), np.arange(n))
    assert [permutation[i] for i in range(min(n, 3))] == permutation.block(0, min(n, 3)).tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_blocks_agree_with_the_whole(data):
    n = data.draw(st.integers(1, 12_000))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    step = data.draw(st.integers(1, 9))
    whole = Permutation(n, 1, 2).block(0, n)
    assert np.array_equal(Permutation(n, 1, 2).block(start, stop, step), whole[start:stop:step])


@pytest.mark.parametrize("n", [10**9, 2**31 - 1, 2**40 + 1, 2**48])
def test_huge_sizes_stay_inside_and_do_not_repeat(n):
    permutation = Permutation(n, 3)
    for start in (0, n // 2, n - 5000):
        block = permutation.block(start, start + 5000)
        assert block.min() >= 0 and block.max() < n
        assert len(set(block.tolist())) == 5000


def test_the_order_never_changes_between_versions():
    assert Permutation(10, 1, 2).block(0, 10).tolist() == [8, 7, 9, 6, 2, 4, 0, 1, 5, 3]
    assert Permutation(10**6, 1, 2).block(0, 5).tolist() == [275549, 840312, 224022, 776885, 555481]
    assert Permutation(10**12, 1, 2).block(10**11, 10**11 + 3).tolist() == [
        307008842068,
        267855348488,
        103416103206,
    ]


@pytest.mark.parametrize("n", [50, 5000])
def test_seed_epoch_and_size_all_matter(n):
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0, "x"), (0,)]
    orders = {tuple(Permutation(n, *key).block(0, 50).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert Permutation(n + 1, 0, 0).block(0, 50).tolist() != Permutation(n, 0, 0).block(0, 50).tolist()


@pytest.mark.parametrize("n", [3, 5, 16, 100, TABLE_SIZE + 1, 6000, 2**16 + 1])
def test_every_element_is_as_likely_at_every_place(n):
    """Chi-square over many keys; the keys are fixed, so this always gives the same figures."""
    keys, cells = 3000, min(n, 16)
    heads = np.array([Permutation(n, key).block(0, 3) for key in range(keys)])
    distance = (heads[:, 1] - heads[:, 0]) % n  # 1..n-1
    for values, choices in ((heads[:, 0], n), (heads[:, 2], n), (distance - 1, n - 1)):
        count = np.bincount(values * cells // choices, minlength=cells)
        sizes = np.bincount(np.arange(choices) * cells // choices, minlength=cells)
        filled = sizes > 0
        expected = keys * sizes[filled] / choices
        chi_square = float(((count[filled] - expected) ** 2 / expected).sum())
        freedom = len(expected) - 1
        assert chi_square < freedom + 5 * (2 * freedom + 1) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    """In a random order about one neighbouring pair in all is a pair of neighbours upwards."""
    n = 50_000
    kept = [int((np.diff(Permutation(n, key).block(0, n)) == 1).sum()) for key in range(40)]
    fixed = [int((Permutation(n, key).block(0, n) == np.arange(n)).sum()) for key in range(40)]
    assert 20 < sum(kept) < 70 and 20 < sum(fixed) < 70


def test_outside_positions_are_refused():
    permutation = Permutation(10, 1)
    for bad in (-1, 10):
        with pytest.raises(IndexError):
            permutation[bad]
    for start, stop in ((5, 11), (-2, 3)):
        with pytest.raises(IndexError):
            permutation.block(start, stop)
    assert permutation.block(4, 4).tolist() == [] and len(Permutation(0)) == 0
    for size in (-1, 2**48 + 1):
        with pytest.raises(ConfigError):
            Permutation(size)


def test_a_billion_samples_take_next_to_no_memory():
    tracemalloc.start()
    order = DistributedOrder(10**9, rank=5, world_size=64, batch_size=8, seed=1)
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


def test_global_batches_do_not_depend_on_the_world_size():
    expected = global_batches(ranks(1, 1000, batch_size=24, seed=3), 24)
    for world_size in (2, 3, 4, 6, 8, 24):
        orders = ranks(world_size, 1000, batch_size=24 // world_size, seed=3)
        assert global_batches(orders, 24 // world_size) == expected


def test_epochs_differ_and_repeat():
    order = DistributedOrder(100, seed=1)
    first = list(order)
    assert list(order) == first
    order.seek(1, 0)
    assert list(order) != first
    order.seek(0, 0)
    assert list(order) == first


def test_without_shuffling_the_order_is_plain():
    assert list(DistributedOrder(10, rank=1, world_size=3, shuffle=False, drop_last=False)) == [1, 4, 7]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps", range(13))
def test_resume_after_any_step_gives_the_very_continuation(steps, shuffle):
    options = {"batch_size": 4, "seed": 2, "shuffle": shuffle}
    for whole, resumed in zip(ranks(2, 100, **options), ranks(2, 100, **options), strict=True):
        whole.seek(3, 0)
        samples = list(whole)
        for _ in range(steps):
            whole.advance(whole.global_batch_size)
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == samples[steps * 4 :]
        assert len(resumed) == len(samples) - steps * 4


interruptions = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 30), st.integers(0, 40)), max_size=5
)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(24, 1500), drop_last=st.booleans(), chain=interruptions)
def test_exactly_once_over_any_chain_of_world_sizes(n, drop_last, chain):
    """Stopped anywhere and continued by more or fewer ranks; without drop_last even with other batches."""
    state, seen = None, []
    for world_size, any_batch, stop in [*chain, (2, 5, n)]:
        batch = 24 // world_size if drop_last else any_batch
        orders = ranks(world_size, n, batch_size=batch, drop_last=drop_last)
        for order in orders:
            order.load_state_dict(state or order.state_dict())
        for step in global_batches(orders, batch)[:stop]:
            seen.extend(step)
            orders[0].advance(len(step))
        state = orders[-1].state_dict() | {"position": orders[0].position}
    whole = Permutation(n, 0, 0).block(0, n // 24 * 24 if drop_last else n)
    assert Counter(seen) == Counter(whole.tolist())


def test_state_counts_trained_samples_not_fetched_ones():
    order = DistributedOrder(1000, batch_size=10)
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


@pytest.mark.filterwarnings("default::DeprecationWarning")  # Python 3.12 warns of any fork beside threads
def test_loader_workers_get_the_same_batches():
    order = DistributedOrder(64, batch_size=8, seed=9)
    loader = torch.utils.data.DataLoader(range(64), batch_size=8, sampler=order, num_workers=2)
    seen = [index for batch in loader for index in batch.tolist()]
    assert seen == list(order)


def test_other_data_is_refused():
    state = DistributedOrder(100, seed=1).state_dict()
    for other in (
        DistributedOrder(99, seed=1),
        DistributedOrder(100, seed=2),
        DistributedOrder(100, seed=1, shuffle=False),
    ):
        with pytest.raises(MismatchError, match="data order"):
            other.load_state_dict(state)


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
def test_impossible_sizes(wrong):
    with pytest.raises(ConfigError):
        DistributedOrder(wrong.pop("n", 10), **wrong)


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (0, 11)])
def test_impossible_positions(epoch, position):
    with pytest.raises(ConfigError):
        DistributedOrder(10).seek(epoch, position)


@given(n=st.integers(0, 1000), world_size=st.integers(1, 20))
def test_evaluation_shares_are_even_and_without_duplicates(n, world_size):
    shares = [shard_range(n, rank, world_size) for rank in range(world_size)]
    assert list(itertools.chain(*shares)) == list(range(n))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
