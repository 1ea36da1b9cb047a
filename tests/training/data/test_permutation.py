"""The keyed permutation: a bijection for every size, even, and the same in every version."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.errors import ConfigError
from slurmddp.training.data.permutation import TABLE_SIZE, Permutation


@pytest.mark.parametrize("n", [*range(TABLE_SIZE - 1, TABLE_SIZE + 2), 8192, *range(65535, 65538), 100_000])
def test_a_bijection_at_the_table_and_at_powers_of_two(n):
    assert np.array_equal(np.sort(Permutation(n, 7).block(0, n)), np.arange(n))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 20_000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_a_bijection_for_any_size_and_key(n, seed, epoch):
    permutation = Permutation(n, seed, epoch)
    assert np.array_equal(np.sort(permutation.block(0, n)), np.arange(n))


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
    for start, stop in ((5, 11), (-2, 3)):
        with pytest.raises(IndexError):
            permutation.block(start, stop)
    assert [] == permutation.block(4, 4).tolist() == Permutation(0).block(0, 0).tolist()
    for size in (-1, 2**48 + 1):
        with pytest.raises(ConfigError):
            Permutation(size)
