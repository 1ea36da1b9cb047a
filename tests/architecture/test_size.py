"""Functions are small, docstrings begin with a named subject or an imperative."""

from __future__ import annotations

import ast
import re

import pytest

from support import ROOT

FILES = sorted((ROOT / "slurmddp").rglob("*.py"))


def test_functions_are_small_and_nine_of_ten_fit_in_25_lines() -> None:
    lengths = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, node.name)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    assert lengths[-1][0] <= 60, lengths[-1]
    assert lengths[int(0.9 * len(lengths))][0] <= 25


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
