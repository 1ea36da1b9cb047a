"""Prose of pages, wrapped so that a terminal and a comparison line by line can show it."""

from __future__ import annotations

import textwrap

COLUMNS = 100
"""The longest line of prose in README and docs."""


def wrap(text: str) -> str:
    """Wrap the paragraphs of a text that has no lists, tables and code blocks."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(
        textwrap.fill(paragraph, COLUMNS, break_long_words=False, break_on_hyphens=False)
        for paragraph in paragraphs
    )
