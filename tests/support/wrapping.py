"""Wrap the prose of pages, so that a terminal and a comparison line by line can show it."""

from __future__ import annotations

import re
import textwrap

COLUMNS = 100
"""The longest line of prose in README and docs."""
CELL = 160
"""The largest number of characters in a table cell of README and docs."""


def linked(text: str) -> str:
    """Return a text of a page in docs/reference/, with links to the pages that the text names."""

    def link(page: re.Match[str]) -> str:
        folder = "" if page[1] == "reference" else f"../{page[1]}/"
        return f"[{page[2]}]({folder}{page[2]}.md)"

    return re.sub(r"\bdocs/(\w+)/([\w-]+)\.md", link, text)


def wrap_item(text: str) -> str:
    """Wrap the text of one item of a list."""
    return textwrap.fill(
        f"- {text}", COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def wrap(text: str) -> str:
    """Wrap the paragraphs of a text that has no lists, tables and code blocks."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(
        textwrap.fill(paragraph, COLUMNS, break_long_words=False, break_on_hyphens=False)
        for paragraph in paragraphs
    )
