"""Functions have few statements; each room has paragraphs, plain statements and plain names.

`style.py` measures the rooms.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from style import PRIVATE_WORDS, SOURCES, Style, rooms, statements, style_of

WITH_REASONS = {
    "batch",
    "checkpoint/files",
    "checkpoint/memory",
    "environments",
    "host",
    "launchers/agent",
    "launchers/agent/startup",
    "launchers/coordinator",
    "launchers/link",
    "launchers/watchdog",
    "remote",
    "runs/folder",
    "sandbox",
    "slurm",
    "slurm/limits",
    "training/process_group",
    "training/stopping",
    "transports",
}
"""Rooms that deal with signals, races, file systems or SLURM: their comments give reasons."""
DENSE = """
def ask(found, own, said):
    first, second = found, own
    return first if second else said
"""
PLAIN = """
def exchange(first, second):
    # A comment.
    first, second = second, first

    shares = first, second
    return shares
"""


def test_functions_are_short_in_statements() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES.rglob("*.py")]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = sorted(
        (statements(node), node.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, functions)
    )
    assert lengths[-1][0] <= 40, lengths[-1]
    assert lengths[int(0.9 * len(lengths))][0] <= 20


def faults(room: str, style: Style) -> Iterator[str]:
    """Yield a phrase for each bound that a room does not keep."""
    blank = style.per_100_body_lines(style.blank_lines)
    if blank < 5:
        yield f"{blank:.1f} blank lines per 100 lines of function bodies, fewer than 5"
    conditional = style.per_100_body_lines(style.conditional_expressions)
    if conditional > 3:
        yield f"{conditional:.1f} conditional expressions per 100 lines of function bodies, more than 3"
    if style.tuple_assignments:
        yield f"{style.tuple_assignments} assignments of unrelated values in one statement"
    if style.private_words > 2:
        yield f"{style.private_words} bindings called {sorted(PRIVATE_WORDS)}"
    comments = style.comments_per_100_code_lines
    if room in WITH_REASONS and comments < 4:
        yield f"{comments:.1f} comments per 100 lines of code, fewer than 4"


def test_each_room_is_readable() -> None:
    for room, style in rooms().items():
        # A room may hold only the docstring of its package.
        if style.body_lines:
            assert [*faults(room, style)] == [], room


def test_a_dense_room_breaks_the_bounds() -> None:
    assert len([*faults("", style_of(DENSE))]) == 4
    assert [*faults("", style_of(PLAIN))] == []


def test_dense_and_plain_code_have_the_expected_measures() -> None:
    assert style_of(DENSE) == Style(
        body_lines=2, conditional_expressions=1, tuple_assignments=1, code_lines=3, private_words=3
    )
    assert style_of(PLAIN) == Style(body_lines=4, blank_lines=1, code_lines=4, comment_lines=1)
