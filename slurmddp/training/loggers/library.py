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
    """Import a module and return it; forks of this process, such as loader workers, wait meanwhile.

    A process that is forked during an import inherits the import's locks. It would wait forever if it
    imported the same module.
    """
    _hold_forks()
    with _importing:
        return importlib.import_module(name)


@functools.cache
def _hold_forks() -> None:
    """Let each fork of this process wait until no import is running."""
    acquired: list[bool] = []

    def release() -> None:
        # A fork that has waited too long goes on without the lock.
        if acquired.pop():
            _importing.release()

    os.register_at_fork(
        before=lambda: acquired.append(_importing.acquire(timeout=_FORK_WAITS_S)),
        after_in_parent=release,
        after_in_child=release,
    )
