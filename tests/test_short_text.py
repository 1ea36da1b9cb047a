"""Texts that are cut for one line of a message or a table."""

from __future__ import annotations

import pytest

from slurmddp.short_text import first_items, first_line, shorten, typed_first_line


@pytest.mark.parametrize(("text", "short"), [("", ""), ("abcdef", "abcdef"), ("abcdefg", "abc...")])
def test_a_text_is_cut_only_beyond_the_limit(text: str, short: str) -> None:
    assert shorten(text, 6) == short


@pytest.mark.parametrize(
    ("error", "line", "typed"),
    [
        (RuntimeError("a\nb"), "a", "RuntimeError: a"),
        (RuntimeError("\n a"), "a", "RuntimeError: "),
        (RuntimeError(), "RuntimeError", "RuntimeError: "),
    ],
)
def test_each_error_has_a_first_line(error: Exception, line: str, typed: str) -> None:
    assert (first_line(error), typed_first_line(error)) == (line, typed)


def test_other_items_are_counted_or_hinted_at() -> None:
    assert first_items([1, 2], 2) == "1, 2"
    assert first_items([1, 2, 3, 4], 2) == "1, 2 and 2 more"
    assert first_items("abc", 2, separator=",", rest=",...") == "a,b,..."
