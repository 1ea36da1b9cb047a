"""Programs that tests run: the Python blocks of the documents, and loops that a stop ends."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from support import ROOT

DOCS = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("runs", "build") for part in page.relative_to(ROOT).parts)
)
_FENCED = re.compile(r"^( *)(```+|~~~+) *(\S*)[^\n]*\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)

# The first attempt takes slow steps, and creates a file once its loop has taken several steps.
SLOW_FIRST_ATTEMPT = """
import os, pathlib, time, torch

def slow(self, *args, count=[0], backward=torch.Tensor.backward, **options):
    count[0] += 1
    if os.environ.get("SLURMDDP_ATTEMPT") == "0":
        time.sleep(0.03)
        if count[0] == 16:
            pathlib.Path("begun").touch()
    return backward(self, *args, **options)

torch.Tensor.backward = slow
"""


def blocks(doc: Path) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page, each with its language."""
    return [(language, textwrap.dedent(body)) for _, _, language, body in _FENCED.findall(doc.read_text())]


def python_blocks(doc: Path) -> list[str]:
    return [body for language, body in blocks(doc) if language == "python"]


def is_program(body: str) -> bool:
    """Return whether a block is Python code, whatever language its fence names."""
    try:
        statements = ast.parse(body).body
    except SyntaxError:
        return False

    return any(
        not isinstance(statement, (ast.Expr, ast.AnnAssign)) or _calls(statement) for statement in statements
    )


def _calls(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def readme_program(folder: Path) -> Path:
    """Write the README's program, which has no line of a test, below lines that slow down its steps."""
    block = python_blocks(ROOT / "README.md")[0]
    script = folder / "readme.py"
    script.write_text(SLOW_FIRST_ATTEMPT + block)
    return script


def newest_weights(run: Path) -> bytes:
    """Return the tensors of the newest checkpoint of a run folder."""
    folder = run / "checkpoints"
    return (folder / (folder / "latest").read_text().strip() / "state.safetensors").read_bytes()


_LOOP = """
import os, signal, sys, torch
from slurmddp import Distributon

{begin}
    d.launch()
    model = d.setup_model(torch.nn.Linear(1, 1))
    for step in range(1, {steps} + 1):
        d.backward(model(torch.ones(1, 1)).sum())
        if step == {signal_after}:
            os.kill(os.getpid(), signal.SIGTERM)
        if d.should_stop():
            d.save(step, model=model)
            {then}
    {last}
"""
WITH = "with Distributon({devices}) as d:"
WITHOUT = "d = Distributon({devices})\nif True:"


def loop_with_a_stop(
    begin: str, then: str, last: str = "pass", *, signal_after: int = 3, devices: int = 1
) -> str:
    """Return a program that gets SIGTERM in step `signal_after` and then runs `then`; it ends with `last`.

    One rank stops at once and takes at most five steps. Several ranks need some more steps to agree.
    """
    return _LOOP.format(
        begin=begin.format(devices=devices),
        then=then,
        last=last,
        signal_after=signal_after,
        steps=5 if devices == 1 else 1_000_000,
    )
