"""The prose of pages is wrapped: people read pages in terminals, and compare them line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.wrapping import CELL, COLUMNS

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "templates").rglob("*.md")),
]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line outside code blocks and tables."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif fence and line.strip() == fence:
            fence = ""
        elif not fence and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    assert [(number, line) for number, line in prose(page.read_text()) if len(line) > COLUMNS] == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_guide_names_the_folder_of_its_commands(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)
    has_commands = re.search(r"^(salloc .*)?slurmddp ", "\n".join(blocks), flags=re.M)
    names_folder = re.search(r"(folder\s+of\s+your\s+project|any\s+folder|a\s+folder\s+without)", text)
    assert names_folder or not has_commands, "write `Type the commands in the folder of your project`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_table_cells_are_short(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > CELL] == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*/*.md")), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_is_in_the_nav_and_in_the_index_of_its_folder(page: Path) -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert re.search(rf" {re.escape(str(page.relative_to(ROOT / 'docs')))}$", nav, flags=re.M), "mkdocs.yml"
    index = page.with_name("index.md")
    assert page == index or f"]({page.name})" in index.read_text(), f"{index} has no link to {page.name}"


def test_code_blocks_and_tables_are_no_prose() -> None:
    text = "a\n\n```text\nb\n```\n\n- c\n\n  ~~~python\n  d\n  ~~~\n| e |\n|---|\nf\n"
    assert [line for _, line in prose(text) if line] == ["a", "- c", "f"]
