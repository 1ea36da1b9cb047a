"""The folder in which a command was typed, by the path that the shell shows."""

from __future__ import annotations

import os
from pathlib import Path


def working_folder() -> Path:
    """Return the current folder by its path in `$PWD`, which may lead through links."""
    # Compute nodes may lack the physical path, as where an automounter shows a file system by links.
    shown = os.environ.get("PWD", "")
    if shown == os.path.normpath(shown) and shown.startswith("/") and _is_current(shown):
        return Path(shown)
    return Path.cwd()


def _is_current(path: str) -> bool:
    """Return whether `path` is the current folder."""
    # A program may have left the folder that its shell recorded.
    try:
        return os.path.samefile(path, ".")  # noqa: PTH121
    except OSError:
        return False
