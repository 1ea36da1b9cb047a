"""Say what to do about errors of a person's program that come from where and how the ranks run."""

from __future__ import annotations

import bdb
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

from slurmddp.plugins import src_layout_hint

_NO_TERMINAL = (
    "Ranks have no terminal for breakpoint() or input(). Run the program once with `python`, "
    "or with `slurmddp exec -n 1 -- python SCRIPT`."
)


def hint_of(error: BaseException) -> str:
    """Return what to do about an error of a program; empty if only its author can know."""
    if isinstance(error, ModuleNotFoundError):
        return _of_module((error.name or "").partition(".")[0])
    if isinstance(error, FileNotFoundError) and _is_relative(error.filename):
        return f"A relative path starts at the project, {Path.cwd()}, here and on the nodes."
    reads_input = isinstance(error, EOFError) and "reading a line" in str(error)
    return _NO_TERMINAL if reads_input or isinstance(error, bdb.BdbQuit) else ""


def _of_module(name: str) -> str:
    """Return how the package `name` gets to the ranks; empty if it is there, and only a part is missing."""
    if hint := src_layout_hint(name):
        return hint
    with suppress(ImportError, ValueError):
        if not name or importlib.util.find_spec(name) is not None:
            return ""
    return f"The ranks run {sys.executable}. If {name} is a package: {sys.executable} -m pip install {name}"


def _is_relative(path: object) -> bool:
    return isinstance(path, str) and bool(path) and not Path(path).is_absolute()
