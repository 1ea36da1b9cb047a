"""The Python blocks of the documents, as programs that tests run."""

from __future__ import annotations

import re
from pathlib import Path

from support import ROOT

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCS += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]

# The first attempt takes its time, and creates a file once its loop has taken several steps.
SLOW_FIRST_ATTEMPT = """
import os, pathlib, time
from torch.utils.data import TensorDataset as Plain

def slow(self, index, count=[0], fetch=Plain.__getitem__):
    count[0] += 1
    if os.environ.get("SLURMDDP_ATTEMPT") == "0":
        time.sleep(0.001)
        if count[0] == 500:
            pathlib.Path("begun").touch()
    return fetch(self, index)

Plain.__getitem__ = slow
"""


def python_blocks(doc: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", doc.read_text(), flags=re.DOTALL | re.MULTILINE)


def readme_program(folder: Path) -> Path:
    """Write the README's program, which has no line of a test, below lines that slow down its data."""
    (block,) = python_blocks(ROOT / "README.md")
    script = folder / "readme.py"
    script.write_text(SLOW_FIRST_ATTEMPT + block)
    return script


def newest_weights(run: Path) -> bytes:
    """Return the tensors of the newest checkpoint of a run folder."""
    folder = run / "checkpoints"
    return (folder / (folder / "latest").read_text().strip() / "state.safetensors").read_bytes()
