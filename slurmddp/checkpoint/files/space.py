"""Checks and reserves disk space before a write, so that a full disk is reported early, with figures."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _WRITE = 0x01, 0x02
_UNSUPPORTED = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV, errno.EINTR}
)
"""Error codes of file systems that can't reserve blocks; they say nothing about the space."""

_UNLIMITED = 1 << 62
SLACK_BYTES = 1 << 20
"""Bytes for the manifest, folder entries and the rounding to blocks."""


class NoRoomError(OSError):
    """The disk or the quota is too small; `errno` is ENOSPC or EDQUOT, `strerror` gives the figures."""


def require(folder: Path, needed: int) -> None:
    """Raise NoRoomError if the file system of `folder` has fewer than `needed` bytes left for this user."""
    free = free_bytes(folder)
    if needed + SLACK_BYTES > free:
        wanted = f"{size_text(needed)} and {size_text(SLACK_BYTES)} to spare"
        raise NoRoomError(errno.ENOSPC, f"it needs {wanted}, and {size_text(free)} are free")


def reserve(descriptor: int, needed: int, folder: Path) -> None:
    """Reserve blocks for a file of `needed` bytes; raises NoRoomError if they are refused.

    Unlike the count of free blocks, a reservation respects quotas, and no other process can take the space.
    The free space is compared first, because a refused call would allocate all free blocks before it fails.
    """
    if needed == 0:
        return
    require(folder, needed)
    code = _fallocate(descriptor, needed)
    if code == 0 or code in _UNSUPPORTED:
        return
    if code == errno.ENOSPC:
        free = size_text(free_bytes(folder))
        raise NoRoomError(code, f"it needs {size_text(needed)}, and {free} are free")
    if code == errno.EDQUOT:
        raise NoRoomError(code, f"it needs {size_text(needed)}, which is more than the quota has left")
    raise OSError(code, os.strerror(code))


def free_bytes(folder: Path) -> int:
    """Return how many bytes an ordinary user may still write; some file systems include project quotas.

    File systems without a count (ramfs, tmpfs without a limit, some FUSE) count as unlimited.
    """
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else _UNLIMITED


def size_text(count: int) -> str:
    """Render a number of bytes: `17 bytes`, `1.5 MB`, `600.0 GB`."""
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _fallocate(descriptor: int, size: int) -> int:
    """Reserve blocks by the system call fallocate; return its errno, 0 for success.

    `os.posix_fallocate` does not serve: without support of the file system, the C library writes into every
    block.
    """
    refused = _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))
    return ctypes.get_errno() if refused else 0


def write_back(descriptor: int, start: int, size: int) -> None:
    """Start to write a part of a file to the disk, so that the disk is not idle until the flush."""
    # A hint only: the flush reports errors.
    _libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _WRITE)
