"""Settings of a benchmark: sizes as typed, the way to the ranks, and refusals."""

from __future__ import annotations

import pytest

from slurmddp.bench.settings import SIZES, Settings, parse_sizes, size_label
from slurmddp.errors import ConfigError


def test_sizes_are_read_in_rising_order_and_shown_as_typed() -> None:
    assert parse_sizes("1MB, 4kB,4kB,12B") == (12, 4_000, 1_000_000)
    assert ",".join(map(size_label, parse_sizes(SIZES))) == SIZES


@pytest.mark.parametrize("text", ["", "7", "1kb", "x", "1kB,,2kB", "-1kB"])
def test_a_word_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_sizes(text)


def test_settings_reach_the_ranks_unchanged() -> None:
    settings = Settings(bench="scaling", sizes=(4, 8), repetitions=3, seed=7)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"bench": "scalings"}, "no benchmark 'scalings'"),
        ({"sizes": ()}, "--sizes"),
        ({"sizes": (6,)}, "--sizes"),
        ({"repetitions": 0}, "--repetitions is 0"),
        ({"batch": -1}, "--batch is -1"),
        ({"warmup": -1}, "--warmup is -1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Settings(**{"bench": "scaling", "sizes": (4,), **wrong})
