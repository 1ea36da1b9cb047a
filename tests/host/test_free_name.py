"""The choice of the first free name of a numbered series."""

from __future__ import annotations

import pytest

from slurmddp.host.free_name import first_free


@pytest.mark.parametrize(
    ("taken", "plain", "name"),
    [
        ((), "", "x-1"),
        (("x-1", "x-3"), "", "x-2"),
        ((), "x", "x"),
        (("x",), "x", "x-2"),
        (("x", "x-2"), "x", "x-3"),
    ],
)
def test_the_first_free_name_is_taken(taken: tuple[str, ...], plain: str, name: str) -> None:
    assert first_free("x-", taken.__contains__, plain=plain) == name
