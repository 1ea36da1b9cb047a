"""SLURM's counts per node, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.environments.hostlist import parse_counts, render_counts
from slurmddp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        ("4(x2),2", (4, 4, 2)),
        ("2,4(x2)", (2, 4, 4)),
        ("1(x3)", (1, 1, 1)),
        ("16,8,16", (16, 8, 16)),
        (" 8(x2) ", (8, 8)),
        ("4(x1)", (4,)),
    ],
)
def test_parse(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", ",", "4,", "4(2)", "4(x)", "x2", "-1", "4 (x2)", "4(x2", "4.0", "\u0664"]
)
def test_nonsense_is_refused_and_shown(text):
    with pytest.raises(ConfigError) as caught:
        parse_counts(text)
    assert repr(text) in caught.value.message


def test_a_count_of_nodes_without_end_is_refused():
    with pytest.raises(ConfigError, match="more than"):
        parse_counts("1(x999999),1(x999999)")


@given(st.lists(st.integers(0, 256), min_size=1, max_size=200))
def test_what_was_rendered_parses_to_the_same_counts(counts):
    assert parse_counts(render_counts(counts)) == tuple(counts)


@given(st.integers(0, 256), st.integers(2, 9999))
def test_equal_counts_are_written_once(count, nodes):
    assert render_counts([count] * nodes) == f"{count}(x{nodes})"
