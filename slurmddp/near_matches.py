"""Suggest the known names that resemble a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_matches(given: str, known: Iterable[str], *, prefix: str = "", else_all: bool = True) -> str:
    """Return a sentence that suggests the names nearest to `given`.

    Args:
        given: the typed name.
        known: all existing names.
        prefix: text to put before each suggested name.
        else_all: whether to list all existing names if no name is near.

    Returns:
        `Did you mean a or b?` if at least one name is near, else `Known: a, b, c.`; an empty text if there
        are no names, or `else_all` is false.

    Example:
        near_matches("stpes", ["steps", "seed"])  # "Did you mean steps?"
    """
    names = sorted(known)
    near = nearest(given, names)
    if near:
        return f"Did you mean {' or '.join(prefix + name for name in near)}?"
    if names and else_all:
        return f"Known: {', '.join(names)}."
    return ""


def nearest(given: str, known: Iterable[str]) -> list[str]:
    """Return the known names that `given` may mean: at most three, the most similar first.

    If no name is similar (difflib's ratio 0.6), names that begin with `given` are returned.
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.6)

    return near or [name for name in names if len(given) > 2 and name.startswith(given)][:3]
