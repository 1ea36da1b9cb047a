"""Functions are small, docstrings begin with a named subject or an imperative, users see no `assert`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = ROOT / "slurmddp"
FILES = sorted(PACKAGE.rglob("*.py"))


def functions(tree: ast.AST) -> list[tuple[str, int]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_documented_and_asserts_nothing(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module's docstring says why the module exists"
    assert text.isascii()
    assert not [name for name, length in functions(tree) if length > 60]
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("room", ["slurmddp", "tests", "benchmarks", "examples"])
def test_docstrings_begin_with_a_subject_or_an_imperative(room: str) -> None:
    nodes = [
        (path, node) for path in (ROOT / room).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [
        (path.name, (ast.get_docstring(node) or "").split("\n")[0])
        for path, node in nodes
        if isinstance(node, kinds)
    ]
    unnamed = re.compile(r"(What|Who|Whoever|Whatever|Which|How|Where|One that|Those that) ")
    assert [(name, line) for name, line in first if unnamed.match(line)] == []


def test_nine_functions_of_ten_fit_in_25_lines() -> None:
    lengths = sorted(length for path in FILES for _, length in functions(ast.parse(path.read_text())))
    assert lengths[int(0.9 * len(lengths))] <= 25


def test_no_room_for_odds_and_ends() -> None:
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "helpers", "helper", "common", "misc"}
