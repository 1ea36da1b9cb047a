"""Hints for errors of a program that come from how its ranks run."""

from __future__ import annotations

import bdb
import sys
from pathlib import Path

import pytest

from slurmddp.runs.folder.program_hints import hint_of


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            FileNotFoundError(2, "No such file", "data/train.bin"),
            "A relative path starts at the project, {cwd}",
        ),
        (FileNotFoundError(2, "No such file", "/data/train.bin"), ""),
        (FileNotFoundError("no name"), ""),
        (ModuleNotFoundError("No module named 'nosuch.part'"), "{python} -m pip install nosuch"),
        (ModuleNotFoundError("No module named 'json.part'"), ""),
        (ModuleNotFoundError("No module named 'mine'"), "src/mine.py is in this project"),
        (EOFError("EOF when reading a line"), "Ranks have no terminal"),
        (EOFError("Ran out of input"), ""),
        (bdb.BdbQuit(), "`slurmddp exec -n 1 -- python SCRIPT`"),
        (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied (64x2 and 3x8)"),
            "The last dimension of an input is 2, but the layer that receives it takes 3",
        ),
        (ValueError("x"), ""),
    ],
)
def test_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").touch()
    expected = hint.format(cwd=tmp_path, python=sys.executable)
    assert expected in hint_of(error) if hint else hint_of(error) == ""
