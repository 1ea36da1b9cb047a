"""Shorten texts for one line of a message or a table."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters; a text that was cut ends with `...`."""
    if len(text) <= limit:
        return text
    return text[: limit - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def typed_first_line(error: BaseException) -> str:
    """Return an error as "TypeName: first line of its message"."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def first_items(
    items: Sequence[object], limit: int, *, separator: str = ", ", rest: str = " and {} more"
) -> str:
    """Join the first items to one text, and add the number of items that are not shown.

    Args:
        items: all items.
        limit: the largest number of items to show.
        separator: text between two items.
        rest: text to add if items are not shown; `{}` is replaced by their number.

    Example:
        first_items(["a", "b", "c"], 2)  # "a, b and 1 more"
    """
    shown = separator.join(str(item) for item in items[:limit])
    if len(items) > limit:
        shown += rest.format(len(items) - limit)

    return shown
