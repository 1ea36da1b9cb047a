"""Check and reserve disk space before a write, so that a full disk is reported early, with figures."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# FALLOC_FL_KEEP_SIZE and SYNC_FILE_RANGE_WRITE, from the kernel's headers; Python has no names for them.
_KEEP_SIZE = 0x01
_WRITE = 0x02
_UNSUPPORTED = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV, errno.EINTR}
)
"""Error codes of file systems that can't reserve blocks; they mean nothing for the free space."""

_UNLIMITED = 1 << 62
"""The number of free bytes that is assumed for a file system that reports no sizes."""
SLACK_BYTES = 1 << 20
"""Bytes for the manifest, for folder entries and for the rounding to blocks."""


class NoRoomError(OSError):
    """The disk or the quota is too small; `errno` is ENOSPC or EDQUOT, `strerror` gives the sizes."""


def require(folder: Path, needed: int) -> None:
    """Raise NoRoomError unless the file system of `folder` has `needed` and SLACK_BYTES free bytes."""
    free = free_bytes(folder)
    if needed + SLACK_BYTES > free:
        need = f"{size_text(needed)} and {size_text(SLACK_BYTES)} to spare"
        raise NoRoomError(errno.ENOSPC, f"it needs {need}, but only {size_text(free)} are free")


def reserve(descriptor: int, needed: int, folder: Path) -> None:
    """Reserve blocks for an open file of `needed` bytes, if the file system supports it.

    Unlike the count of free blocks, a reservation respects quotas, and no other process can take the space.

    Args:
        descriptor: the descriptor of the file.
        needed: the size in bytes; 0 reserves nothing.
        folder: the folder of the file.

    Raises:
        NoRoomError: the disk or the quota is too small.
        OSError: the reservation failed for another reason.
    """
    if needed == 0:
        return

    # Check first: a reservation that does not fit allocates all free blocks before it fails.
    require(folder, needed)
    code = _fallocate(descriptor, needed)
    if code == 0 or code in _UNSUPPORTED:
        return

    if code == errno.ENOSPC:
        free = size_text(free_bytes(folder))
        raise NoRoomError(code, f"it needs {size_text(needed)}, but only {free} are free")
    if code == errno.EDQUOT:
        raise NoRoomError(code, f"it needs {size_text(needed)}, which is more than the quota has left")
    raise OSError(code, os.strerror(code))


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free for users other than root; some file systems subtract project quotas."""
    status = os.statvfs(folder)
    # ramfs, tmpfs without a limit and some FUSE file systems report 0 blocks, but have no limit.
    if status.f_blocks == 0:
        return _UNLIMITED
    return status.f_bavail * status.f_frsize


def size_text(count: int) -> str:
    """Return a number of bytes as text: `17 bytes`, `1.5 MB`, `600.0 GB`."""
    if count < 1000:
        return f"{count} bytes"

    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"

    return f"{size / 1000:.1f} TB"


def _fallocate(descriptor: int, size: int) -> int:
    """Reserve blocks by the system call fallocate; return its errno, 0 for success."""
    # Not `os.posix_fallocate`: if the file system does not support it, the C library writes into every block.
    refused = _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))
    return ctypes.get_errno() if refused else 0


def write_back(descriptor: int, start: int, size: int) -> None:
    """Let the kernel start to write a range of a file to the disk, so that less is left for the flush.

    Args:
        descriptor: the descriptor of the file.
        start: the first byte of the range.
        size: the length of the range in bytes.
    """
    # The result is ignored, because the later fsync reports errors.
    _libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _WRITE)
