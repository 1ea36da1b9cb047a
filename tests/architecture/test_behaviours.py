"""Each promised behaviour has a row in docs/internals/behaviours.md; its tests exist and have its number."""

from __future__ import annotations

import re

import pytest

from support import ROOT, TESTS

PAGE = ROOT / "docs" / "internals" / "behaviours.md"
NUMBERS = [
    *(f"D{number}" for number in range(1, 14)),
    *(f"T{number}" for number in range(1, 16)),
    *(f"G{number}" for number in range(1, 13)),
    "C1",
    "C2",
    "C3",
    "C4",
    "C5",
    "C6",
    "C7",
    "C8",
    "C9",
]
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| \[.+\]\(.+\) \|$", PAGE.read_text(), re.MULTILINE)
BLOCKS = re.findall(r"^([A-Z]\d+) +(.+(?:\n .+)*)", PAGE.read_text(), re.MULTILINE)
"""The numbers of behaviours, each with the tests that a block below its table names."""
CARRIES = re.compile(r"def test_((?:[dtgc]\d+_)+)", re.MULTILINE)


def test_every_number_has_one_row_and_tests() -> None:
    assert [number for number, _ in ROWS] == NUMBERS
    assert [number for number, _ in BLOCKS] == NUMBERS
    assert len(re.findall(r"^\| [A-Z]\d", PAGE.read_text(), re.MULTILINE)) == len(ROWS), (
        "a row of another form"
    )
    assert [behaviour for _, behaviour in ROWS if not behaviour.endswith(".")] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0])
def test_the_tests_of_a_behaviour_exist_and_carry_its_number(block: tuple[str, str]) -> None:
    number, tests = block
    for name in tests.split():
        file, _, test = name.partition("::")
        numbers = re.match(r"test_((?:[dtgc]\d+_)+)", test)
        assert numbers and number.lower() in numbers[1].split("_"), f"{test} does not carry {number}"
        text = (TESTS / file).read_text() if (TESTS / file).is_file() else ""
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_a_number_in_the_name_of_a_test_has_a_row() -> None:
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    prefixes = {prefix for text in texts for prefix in CARRIES.findall(text)}
    numbers = {number.upper() for prefix in prefixes for number in prefix.split("_") if number}
    assert numbers <= set(NUMBERS)


def test_the_tests_that_the_docs_name_exist() -> None:
    named = {
        found
        for page in (ROOT / "docs").rglob("*.md")
        for found in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text())
    }
    missing = [
        f"{file}::{test}" for file, test in named if f"\ndef {test}(" not in (TESTS / file).read_text()
    ]
    assert not missing
