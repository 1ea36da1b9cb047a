"""A class name has one meaning: no two classes of the package have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from support import ROOT

ALLOWED = {
    "Link": "the public interface of transports between ranks, and the link between agents of launchers/link",
}
"""Names of several classes, each with the reason to keep it."""


def classes(files: list[Path]) -> dict[str, list[Path]]:
    """Return the files that define each class, also inside functions and classes."""
    places: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return places


def test_no_two_classes_share_a_name() -> None:
    places = classes(sorted((ROOT / "slurmddp").rglob("*.py")))
    shared = {
        name: [str(file.relative_to(ROOT)) for file in files]
        for name, files in places.items()
        if len(files) > 1
    }
    assert {name: files for name, files in shared.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= shared.keys(), "ALLOWED lists a name that one class has alone"


def test_classes_of_one_name_are_found(tmp_path: Path) -> None:
    first = tmp_path / "first.py"
    second = tmp_path / "second.py"
    first.write_text("class Plan: ...\n\nclass Node: ...\n")
    second.write_text("def build():\n    class Plan: ...\n")
    assert classes([first, second]) == {"Plan": [first, second], "Node": [first]}
