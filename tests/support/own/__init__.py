"""The classes of docs/guides/extending.md, in modules from which ranks import them."""

from __future__ import annotations

from typing import Any

from support import ROOT
from support.distributed.doc_programs import python_blocks


def define(name: str, module: dict[str, Any]) -> None:
    """Run the block of docs/guides/extending.md that defines `name`, with the names of a module."""
    page = ROOT / "docs" / "guides" / "extending.md"
    [block] = [code for code in python_blocks(page) if f"class {name}:" in code or f"def {name}(" in code]
    exec(compile(block, str(page), "exec"), module)
