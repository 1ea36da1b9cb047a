"""Looks for space before a byte is written, so that a full disk is said with figures and in time."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

_KEEP_SIZE = 0x01
_NO_PROMISE = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV, errno.EINTR}
)
"""What a file system says that can't reserve: nothing is known then."""

_BOUNDLESS = 1 << 62
SLACK_BYTES = 1 << 20
"""For manifest, folder entries and the rounding up to blocks."""


class NoRoomError(OSError):
    """The disk or the quota is too small; `errno` is ENOSPC or EDQUOT, `strerror` gives the figures."""


def require(folder: Path, needed: int) -> None:
    """Raise NoRoomError when the file system of `folder` has fewer bytes left for this user than `needed`."""
    free = free_bytes(folder)
    if needed + SLACK_BYTES > free:
        wanted = f"{size_text(needed)} and {size_text(SLACK_BYTES)} to spare"
        raise NoRoomError(errno.ENOSPC, f"it needs {wanted}, and {size_text(free)} are free")


def reserve(descriptor: int, needed: int, folder: Path) -> None:
    """Set blocks aside for a file that will have `needed` bytes; raises NoRoomError when they are refused.

    Unlike the count of free blocks this sees quotas, and nobody else can take the space meanwhile. More than
    is free is never asked for: the call would take all that there is before it fails.
    """
    if needed == 0:
        return
    require(folder, needed)
    code = _fallocate()(descriptor, needed)
    if code == 0 or code in _NO_PROMISE:
        return
    if code == errno.ENOSPC:
        free = size_text(free_bytes(folder))
        raise NoRoomError(code, f"it needs {size_text(needed)}, and {free} are free")
    if code == errno.EDQUOT:
        raise NoRoomError(code, f"it needs {size_text(needed)}, which is more than the quota has left")
    raise OSError(code, os.strerror(code))


def free_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write there; project quotas count on some file systems.

    One that counts nothing (a ramfs, a tmpfs without a limit, some in user space) is taken for boundless.
    """
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else _BOUNDLESS


def size_text(count: int) -> str:
    """Say a number of bytes: `17 bytes`, `1.5 MB`, `600.0 GB`."""
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


@cache
def _fallocate() -> Callable[[int, int], int]:
    """Return the system call as a function (descriptor, bytes) -> errno.

    Python's own `posix_fallocate` is no choice: where the file system has no such call, the C library writes
    into every single block instead.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return lambda descriptor, size: errno.ENOSYS
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def reserve(descriptor: int, size: int) -> int:
        return ctypes.get_errno() if call(descriptor, _KEEP_SIZE, 0, size) else 0

    return reserve


_WRITE = 0x02


def write_back(descriptor: int, start: int, size: int) -> None:
    """Let the disk begin with a part of a file that is written, so that it is not idle until the flush."""
    call = _sync_file_range()
    if call is not None:
        call(descriptor, start, size, _WRITE)  # A hint: what goes wrong comes up again in the flush.


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], int]", call)
