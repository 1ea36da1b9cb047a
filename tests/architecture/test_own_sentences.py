"""No code decides by the words of slurmddp's own sentences, so that anybody may reword a sentence.

Each sentence has a value beside it to decide by: the kind of a failure, the class of an error, the state of a
run. Messages of SLURM, ssh or torch are read where they are the only source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from support import ROOT

SENTENCES = frozenset({"reason", "message", "hint", "detail", "advice", "sentence", "short", "remedy", "why"})
"""Names of fields that hold a sentence for people."""
READS = frozenset({"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"})
READS |= {"split", "rsplit", "find", "index", "count"}
SEARCHES = frozenset({"match", "search", "fullmatch", "findall", "finditer", "sub"})
ALLOWED = {
    "slurmddp/slurm/client.py": "the message of a SlurmError holds the words of SLURM",
    "slurmddp/slurm/limits/queries.py": "the message of a SlurmError holds the words of SLURM",
    "slurmddp/runs/failures/failure.py": "records of earlier versions have a reason, and no kind",
}
"""Modules that read a sentence, each with its reason."""


def is_sentence(node: ast.AST) -> bool:
    """Return whether an expression contains a field that holds a sentence."""
    return any(isinstance(inner, ast.Attribute) and inner.attr in SENTENCES for inner in ast.walk(node))


def has_words(nodes: list[ast.expr]) -> bool:
    """Return whether a value may hold words: a text with letters, or no literal."""
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return len(texts) < len(nodes) or any(char.isalpha() for text in texts for char in str(text or ""))


def reads(source: str) -> Iterator[int]:
    """Yield the numbers of lines that search a sentence for words, or compare it with words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_text = node.func.attr in READS and is_sentence(node.func.value) and has_words(node.args)
            of_pattern = node.func.attr in SEARCHES and any(map(is_sentence, node.args))
            if of_text or of_pattern:
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = [side for side in sides if not is_sentence(side)]
            is_equality = any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops)
            is_literal = all(isinstance(side, (ast.Constant, ast.Tuple, ast.Set)) for side in words)
            if is_equality and len(words) < len(sides) and words and is_literal and has_words(words):
                yield node.lineno


def test_no_module_reads_a_sentence_of_slurmddp() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "slurmddp").rglob("*.py")}
    found = {name: sorted({*reads(path.read_text())}) for name, path in sorted(files.items())}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found[name]] == [], "ALLOWED lists a module that reads none"


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ('failure.reason.startswith("stalled")', True),
        ("self.reason.startswith(causes.STALLED)", True),
        ('re.search("no space", str(error.message).lower())', True),
        ("_KNOWN.match(run.detail)", True),
        ('"invalid" in error.message', True),
        ('found.reason == "ended by its agent"', True),
        ('failure.kind == "stalled"', False),
        ('failure.reason.removesuffix(".")', False),
        ('error.message.endswith("\\n")', False),
        ("before.reason == after.reason", False),
        ('failure.reason == ""', False),
    ],
)
def test_reads_differ_from_other_uses_of_a_sentence(line: str, is_read: bool) -> None:
    assert bool([*reads(line)]) == is_read
