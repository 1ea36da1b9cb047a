"""Docstrings begin with a subject or an imperative; sources are ASCII; rooms have a subject."""

from __future__ import annotations

import re

import pytest

from support import ROOT

FILES = sorted((ROOT / "slurmddp").rglob("*.py"))


@pytest.mark.parametrize("room", ["slurmddp", "tests", "benchmarks", "examples"])
def test_docstrings_begin_with_a_subject_or_an_imperative(room: str) -> None:
    unnamed = re.compile(
        r'(?:\A|:\n)\s*"""(?:What|Who|Whoever|Whatever|Which|How|Where|One that|Those that) '
    )
    files = (ROOT / room).rglob("*.py")
    assert {path.name: found for path in files if (found := unnamed.findall(path.read_text()))} == {}


def test_sources_are_plain_text_and_no_room_holds_odds_and_ends() -> None:
    assert [path.name for path in FILES if not path.read_text().isascii()] == []
    assert not {path.stem for path in FILES} & {"utils", "util", "helpers", "helper", "common", "misc"}
