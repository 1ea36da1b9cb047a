"""Copies of the examples, in which tests run them."""

from __future__ import annotations

import shutil
from pathlib import Path

from support import ROOT

EXAMPLES = ROOT / "examples"
_RESULTS = shutil.ignore_patterns("runs", "checkpoints", "lightning", "__pycache__")
"""Folders that a run leaves beside its example."""


def example(name: str, folder: Path) -> Path:
    """Return a copy of an example, without the results of earlier runs."""
    return Path(shutil.copytree(EXAMPLES / name, folder / name, ignore=_RESULTS))
