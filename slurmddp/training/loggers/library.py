"""Import a logger's library in a thread, while no process is forked."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from typing import Any

_FORK_WAITS_S = 5.0
"""Seconds that a fork waits at most; imports of loggers take one or two."""
_importing = threading.RLock()


def imported(name: str) -> Any:
    """Import a module and return it; forks of this process wait meanwhile.

    A process that is forked during an import inherits its locks and waits forever if it imports the same
    module. Loader workers are forked so.
    """
    _hold_forks()
    with _importing:
        return importlib.import_module(name)


@functools.cache
def _hold_forks() -> None:
    held: list[bool] = []

    def release() -> None:
        if held.pop():
            _importing.release()

    os.register_at_fork(
        before=lambda: held.append(_importing.acquire(timeout=_FORK_WAITS_S)),
        after_in_parent=release,
        after_in_child=release,
    )
