"""Environment variables that are set for as long as a process is a rank."""

from __future__ import annotations

import contextlib
import os


def set_variable(name: str, value: str, undo: contextlib.ExitStack) -> None:
    """Set a variable of this process until `undo` is closed."""
    undo.callback(_restore, name, os.environ.get(name))
    os.environ[name] = value


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
