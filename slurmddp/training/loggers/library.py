"""Import a logger's library in a thread while no process is forked."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from typing import Any

_FORK_WAITS_S = 5.0
"""The longest time in seconds that a fork waits; imports of loggers take one or two."""
_importing = threading.RLock()


def imported(name: str) -> Any:
    """Import the module `name` and return it, while forks of this process (loader workers) wait.

    A process that is forked during an import inherits locked import locks. It would wait forever if it
    imported the same module.
    """
    _hold_forks()
    with _importing:
        return importlib.import_module(name)


@functools.cache
def _hold_forks() -> None:
    """Register fork handlers, once, that make `os.fork` wait while `imported` runs in another thread."""
    acquired: list[bool] = []

    def release() -> None:
        # A fork that waited for `_FORK_WAITS_S` seconds continues without the lock, and has nothing to
        # release.
        if acquired.pop():
            _importing.release()

    os.register_at_fork(
        before=lambda: acquired.append(_importing.acquire(timeout=_FORK_WAITS_S)),
        after_in_parent=release,
        after_in_child=release,
    )
