"""Measure how densely the code of each room is written, and how many private words name its values.

`make lint` prints the table. The measures show drift; they don't judge taste. `test_style.py` has the bounds
that each room keeps.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

PRIVATE_WORDS = {"one", "found", "own", "told", "said", "here", "there", "most", "words"}
"""Names that don't show the kind of their value."""
SOURCES = Path(__file__).parents[2] / "slurmddp"


@dataclass(frozen=True)
class Style:
    """Counts in a set of files; the counts of two sets can be added."""

    body_lines: int = 0
    """Lines of function bodies without docstrings."""
    blank_lines: int = 0
    conditional_expressions: int = 0
    tuple_assignments: int = 0
    """Statements that assign unrelated values: `a, b = x, y`. A swap of values does not count."""
    code_lines: int = 0
    """Lines with code, without comments and docstrings."""
    comment_lines: int = 0
    """Lines that hold only a comment."""
    private_words: int = 0
    """Assignments, loops and arguments whose name is in `PRIVATE_WORDS`."""

    def __add__(self, other: Style) -> Style:
        return Style(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def per_100_body_lines(self, count: int) -> float:
        return 100 * count / max(1, self.body_lines)

    @property
    def comments_per_100_code_lines(self) -> float:
        return 100 * self.comment_lines / max(1, self.code_lines)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module, without the functions inside them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        else:
            yield from functions(node)


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of statements in a function, without its docstring."""
    count = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    return count - (ast.get_docstring(function) is not None)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of a function's body after its docstring."""
    first = function.body[0]
    start = first.lineno - 1
    if ast.get_docstring(function) is not None:
        start = first.end_lineno or first.lineno
    return lines[start : function.end_lineno]


def docstring_lines(node: ast.AST, lines: Sequence[str]) -> int:
    """Return the number of lines with text in a docstring, also of an attribute; 0 for another node."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return 0
    if not isinstance(node.value.value, str):
        return 0
    return sum(bool(line.strip()) for line in lines[node.lineno - 1 : node.end_lineno])


def is_unrelated(node: ast.AST) -> bool:
    """Return whether a statement binds several values that don't come from one expression."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False

    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    values = {ast.unparse(value) for value in node.value.elts}
    return any({ast.unparse(name) for name in target.elts} != values for target in targets)


def is_private_word(node: ast.AST) -> bool:
    """Return whether a node binds a private word, as an assignment, a loop or an argument does."""
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in PRIVATE_WORDS
    return isinstance(node, ast.arg) and node.arg in PRIVATE_WORDS


def style_of(source: str) -> Style:
    """Measure one module."""
    lines = source.splitlines()
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    bodies = [line for function in functions(tree) for line in body_lines(function, lines)]

    comments = sum(line.lstrip().startswith("#") for line in lines)
    docstrings = sum(docstring_lines(node, lines) for node in nodes)
    written = sum(bool(line.strip()) for line in lines)
    return Style(
        body_lines=len(bodies),
        blank_lines=sum(not line.strip() for line in bodies),
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        tuple_assignments=sum(map(is_unrelated, nodes)),
        code_lines=written - comments - docstrings,
        comment_lines=comments,
        private_words=sum(map(is_private_word, nodes)),
    )


def rooms() -> dict[str, Style]:
    """Measure each room. A room is a folder of the package that holds modules."""
    measured: dict[str, Style] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        room = path.parent.relative_to(SOURCES).as_posix()
        measured[room] = measured.get(room, Style()) + style_of(path.read_text(encoding="utf-8"))
    return measured


def print_table() -> None:
    """Print the measures of each room, the longest room first, and the measures of the whole package."""
    measured = rooms()
    ordered = sorted(measured.items(), key=lambda item: -item[1].body_lines)
    print("per 100 lines of function bodies (comments: per 100 lines of code)")
    print(f"{'room':28}{'lines':>7}{'blank':>8}{'if-else':>9}{'tuples':>8}{'comments':>10}{'words':>7}")
    for room, style in [*ordered, ("all", sum(measured.values(), Style()))]:
        print(
            f"{room:28}{style.body_lines:7}"
            f"{style.per_100_body_lines(style.blank_lines):8.1f}"
            f"{style.per_100_body_lines(style.conditional_expressions):9.1f}"
            f"{style.per_100_body_lines(style.tuple_assignments):8.1f}"
            f"{style.comments_per_100_code_lines:10.1f}{style.private_words:7}"
        )


if __name__ == "__main__":
    sys.exit(print_table())
