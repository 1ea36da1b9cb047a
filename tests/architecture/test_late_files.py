"""No code looks up a file by name that another host may be about to write.

`runs/folder/late_files.py` gives the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.runs.folder.layout import LATE, RunFolder

PACKAGE = Path(__file__).parents[2] / "slurmddp"
METHODS = {"exists", "is_file", "is_dir", "stat", "lstat", "open", "read_text", "read_bytes"}
FUNCTIONS = {"open", "exists", "isfile", "isdir", "lexists", "stat", "lstat", "access", "getsize", "getmtime"}
READER = "late_files.py"
LOOKED_UP = """
def wait(folder, attempt):
    path = folder.exit_file(attempt, 1)
    while not {question}:
        pass
"""


def nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without the nodes of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from nodes_of(child)


def is_late(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is the path of a late file, or of a file below a late folder."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in LATE or (node.attr not in METHODS and is_late(node.value, names))
    if isinstance(node, ast.Call):
        return is_late(node.func, names)
    return isinstance(node, ast.BinOp) and is_late(node.left, names)


def writes(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing."""
    if any(isinstance(node, ast.Attribute) and node.attr == "O_CREAT" for node in ast.walk(call)):
        return True
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    constants = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
    modes = [value for value in constants if isinstance(value, str)]
    return any(set(mode) & set("wax+") and set(mode) <= set("wax+rbt") for mode in modes)


def asked_before(function: ast.AST) -> Iterator[ast.expr]:
    """Yield the paths that a function passes to `is_there`: after the listing it may open them."""
    for node in nodes_of(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "is_there":
            yield from node.args


def look_ups(source: str) -> list[int]:
    """Return the numbers of lines that look up a late file by name."""
    lines = []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        asked = {ast.dump(argument) for argument in asked_before(function)}
        names: set[str] = set()
        for node in nodes_of(function):
            if isinstance(node, ast.Assign) and is_late(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for call in nodes_of(function):
            if not isinstance(call, ast.Call) or writes(call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            paths = call.args if name in FUNCTIONS else []
            if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
                paths = [*paths, call.func.value]
            if any(is_late(path, names) and ast.dump(path) not in asked for path in paths):
                lines.append(call.lineno)
    return lines


def test_only_one_module_looks_up_files_of_other_hosts() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != READER
        for line in look_ups(path.read_text(encoding="utf-8"))
    ]
    assert not found, "check with is_there, read with read_text (runs/folder/late_files.py)"


@pytest.mark.parametrize(
    "question", ["path.exists()", "path.is_file()", "os.path.lexists(path)", "path.read_text()", "open(path)",
                 "folder.stop_file.exists()", "(folder.log_dir(attempt) / 'set-up').exists()"]
)  # fmt: skip
def test_a_look_up_by_name_is_found(question: str) -> None:
    assert look_ups(LOOKED_UP.format(question=question)) == [4]


@pytest.mark.parametrize(
    "question", ["is_there(path)", "path.open('wb')", "path.parent.name", "read_text(path)"]
)
def test_a_listing_before_the_look_up_is_allowed(question: str) -> None:
    assert look_ups(LOOKED_UP.format(question=question)) == []


def test_the_layout_has_each_late_file() -> None:
    assert vars(RunFolder).keys() >= LATE
