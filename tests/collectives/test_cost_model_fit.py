"""The constants of the cost model come back from noisy times, and predict sizes that the fit has not seen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slurmddp.collectives.cost_model import WORK, ClusterCosts, Work
from slurmddp.collectives.cost_model_fit import Measurement, fit, held_out_sizes, validate
from slurmddp.errors import ConfigError

MACHINE = ClusterCosts(alpha_s=4e-5, beta_s=8e-10, gamma_s=2e-10)
SIZES = [1_000 * 4**power for power in range(9)]
NOISE = 0.05


def times(noise: float, machine: ClusterCosts = MACHINE) -> list[Measurement]:
    draw = random.Random(7)

    def noisy(work: Work) -> float:
        return work.seconds(machine) * (1 + draw.uniform(-noise, noise))

    sums = [Measurement.addition(size, noisy(Work(messages=0, sent=0, added=size))) for size in SIZES]
    return sums + [
        Measurement.all_reduce(name, ranks, size, noisy(work(ranks, size)))
        for name, work in WORK.items()
        for ranks in (4, 8)
        for size in SIZES
    ]


def test_c7_the_constants_come_back_from_exact_times() -> None:
    found = fit(times(noise=0))
    assert vars(found) == pytest.approx(vars(MACHINE), rel=1e-6)


def test_c7_sizes_that_the_fit_has_not_seen_are_predicted_within_the_noise() -> None:
    found = validate(times(NOISE))
    assert found.held_out == (4_000, 256_000, 16_384_000)
    assert found.largest_error < 1.5 * NOISE and found.median_error < NOISE


def test_c7_a_wrong_formula_is_seen_in_the_error_on_held_out_sizes() -> None:
    """Times that grow with the square of the size fit no constants of the model."""
    square = [Measurement.all_reduce("ring", 4, size, 1e-4 + 1e-12 * size**2) for size in SIZES]
    assert validate(square).largest_error > 0.5


def test_no_constant_is_negative() -> None:
    without_sums = ClusterCosts(alpha_s=1e-5, beta_s=1e-9, gamma_s=1e-14)
    found = fit(times(NOISE, without_sums))
    assert min(vars(found).values()) >= 0
    assert found.alpha_s == pytest.approx(1e-5, rel=2 * NOISE)


@pytest.mark.parametrize(
    ("sizes", "held"), [([1, 2], []), ([1, 2, 3], [2]), ([5, 1, 2, 3, 4], [2]), ([1, 2, 3, 4, 5, 6], [2, 5])]
)
def test_smallest_and_largest_sizes_are_never_held_out(sizes: list[int], held: list[int]) -> None:
    assert held_out_sizes(sizes) == set(held)


def test_too_few_times_are_refused() -> None:
    one = times(0)[:2]
    with pytest.raises(ConfigError, match="fewer than three measurements"):
        fit(one)
    with pytest.raises(ConfigError, match="three sizes"):
        validate(one)


def test_c7_the_fit_does_not_see_the_held_out_sizes() -> None:
    """Times of held-out sizes that are ten times too long leave the constants as they are."""
    held = held_out_sizes(SIZES)
    spoilt = [replace(one, seconds=one.seconds * 10) if one.bytes in held else one for one in times(noise=0)]
    found = validate(spoilt)
    assert vars(found.costs) == pytest.approx(vars(MACHINE), rel=1e-6)
    assert found.median_error == pytest.approx(0.9)


def test_c7_the_error_is_of_all_reduces_alone() -> None:
    """Times of held-out additions that are ten times too long leave the error as it is."""
    spoilt = [one if one.work.messages else replace(one, seconds=one.seconds * 10) for one in times(noise=0)]
    held = held_out_sizes(SIZES)
    exact = [one for one in times(noise=0) if one.bytes not in held]
    found = validate(exact + [one for one in spoilt if one.bytes in held])
    assert found.largest_error == pytest.approx(0, abs=1e-6)
