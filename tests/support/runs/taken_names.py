"""A file system that reports a name that exists as sshfs does when two hosts create it at once."""

from __future__ import annotations

import errno
import os
from typing import Any


def refusing_open(path: str, flags: int, mode: int = 0o777, **more: Any) -> int:
    """Open a file; raise PermissionError in place of FileExistsError."""
    try:
        return _open(path, flags, mode, **more)
    except FileExistsError:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path)) from None


_open = os.open
