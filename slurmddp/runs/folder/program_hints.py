"""Give advice on errors of a person's program that arise from the way in which ranks run it."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from slurmddp.plugins import src_layout_hint

_NO_TERMINAL = (
    "Ranks have no terminal for breakpoint() or input(). Run the program once with `python`, "
    "or with `slurmddp exec -n 1 -- python SCRIPT`."
)
_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<name>[^'.]+)")
_FILE = re.compile(r"FileNotFoundError: .*: '(?P<path>[^']+)'$")
_SHAPES = re.compile(r"RuntimeError: mat1 and mat2 shapes .* \(\d+x(?P<given>\d+) and (?P<taken>\d+)x\d+\)")
_INPUT = re.compile(r"EOFError: .*reading a line|bdb\.BdbQuit$")


def hint_of(error: BaseException) -> str:
    """Return advice about an exception of a person's program; empty if none is known."""
    return hint_after(traceback.format_exception_only(error)[-1].strip())


def hint_after(line: str) -> str:
    """Return advice about the error in the last line of a traceback; empty if none is known."""
    module = _MODULE.match(line)
    if module:
        return _module_hint(module["name"])

    file = _FILE.match(line)
    if file and not Path(file["path"]).is_absolute():
        return f"A relative path starts at the project, {Path.cwd()}, here and on the nodes."

    shapes = _SHAPES.match(line)
    if shapes:
        return (
            f"The last dimension of an input is {shapes['given']}, but the layer that receives it takes "
            f"{shapes['taken']}: change the size of the layer, or reshape its input."
        )
    return _NO_TERMINAL if _INPUT.match(line) else ""


def _module_hint(name: str) -> str:
    """Return how to make the package `name` importable; empty if only a submodule of it is missing."""
    hint = src_layout_hint(name)
    if hint:
        return hint

    with suppress(ImportError, ValueError):
        if importlib.util.find_spec(name) is not None:
            return ""
    install = f"{sys.executable} -m pip install {name}"
    return f"The ranks run {sys.executable}. If {name} is a package, install it there: `{install}`."
