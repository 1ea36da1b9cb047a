"""Shorten the documents of results, so that an agent can read them at once."""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 40_000
"""Largest size of a document as JSON."""
_STEPS = ((400, 20_000), (100, 6_000), (30, 2_000), (10, 600))
"""The largest number of items of a list, and of characters of a text, from the first attempt to the last."""
_NEWEST_LAST = frozenset({"lines", "last_lines", "history"})
"""Lists whose last items matter most; of other lists, the first items are kept."""


def shortened(document: dict[str, Any], max_bytes: int = MAX_BYTES) -> tuple[dict[str, Any], list[str]]:
    """Return a document in which long lists and texts are cut, until it is small enough.

    Args:
        document: a JSON document.
        max_bytes: the largest size; a document of few long parts may remain larger.

    Returns:
        The document, and a sentence about each part that was cut.
    """
    short = document
    cuts: list[str] = []
    for items, characters in _STEPS:
        cuts = []
        short = {key: _cut(value, key, items, characters, cuts) for key, value in document.items()}
        if len(json.dumps(short).encode()) <= max_bytes:
            break

    return short, cuts


def _cut(value: Any, place: str, items: int, characters: int, cuts: list[str]) -> Any:
    """Return a value with at most `items` items in each list and `characters` characters in each text.

    Args:
        value: the value.
        place: the keys that lead to the value, for the sentences.
        items: the largest number of items.
        characters: the largest number of characters.
        cuts: gets a sentence about each part that was cut.
    """
    if isinstance(value, str) and len(value) > characters:
        cuts.append(f"`{place}` has the first {characters} of {len(value)} characters.")
        return value[:characters]
    if isinstance(value, dict):
        return {key: _cut(inner, f"{place}.{key}", items, characters, cuts) for key, inner in value.items()}
    if not isinstance(value, list):
        return value

    kept = value
    if len(value) > items:
        is_newest_last = place.rpartition(".")[2] in _NEWEST_LAST
        kept = value[-items:] if is_newest_last else value[:items]
        cuts.append(
            f"`{place}` has the {'last' if is_newest_last else 'first'} {items} of {len(value)} items."
        )

    return [_cut(item, f"{place}[{index}]", items, characters, cuts) for index, item in enumerate(kept)]
