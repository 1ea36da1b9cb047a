"""The folder in which a command was typed, by the path that the shell shows."""

from __future__ import annotations

import os
from pathlib import Path


def working_folder() -> Path:
    """Return the path of the current folder, if possible from `$PWD`, which may contain symbolic links."""
    # $PWD is preferred, because compute nodes may lack the physical path: an automounter may show a file
    # system by links.
    shown = os.environ.get("PWD", "")
    if shown == os.path.normpath(shown) and shown.startswith("/") and _is_current(shown):
        return Path(shown)
    return Path.cwd()


def _is_current(path: str) -> bool:
    """Return whether `path` is the current folder."""
    # $PWD may be out of date: the program may have changed its folder after the shell set the variable.
    try:
        return os.path.samefile(path, ".")  # noqa: PTH121
    except OSError:
        return False
