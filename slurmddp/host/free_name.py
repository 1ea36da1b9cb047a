"""Choose the first free name of a numbered series."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


def first_free(stem: str, is_taken: Callable[[str], object], *, plain: str = "") -> str:
    """Return the first of `STEM1`, `STEM2` and so on that is not taken.

    Args:
        stem: the beginning of each name.
        is_taken: returns whether a name is in use.
        plain: the name in place of `STEM1`.
    """
    names = (plain if plain and number == 1 else f"{stem}{number}" for number in count(1))
    return next(name for name in names if not is_taken(name))
