"""Lock a file against other processes; on some file systems no file can be locked."""

from __future__ import annotations

import errno
import fcntl
from typing import IO

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors for a file that another process has locked; EACCES comes from network file systems."""
_NO_LOCKS = (
    errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOTTY, errno.EBADF,
)  # fmt: skip
"""Errors for a file that can't be locked; EBADF comes from NFS if the file is not open for writing."""


def try_lock(file: int | IO[bytes], *, shared: bool = False) -> bool | None:
    """Try to lock an open file; the lock is held until all descriptors of the file are closed. Does not wait.

    Args:
        file: the file, or the descriptor of a file or folder.
        shared: whether other processes may hold such a lock as well.

    Returns:
        True if the file is locked now, False if another process holds a lock. None if the file can't be
        locked, as on a file system without locks: the caller then has to do its work without a lock.

    Raises:
        OSError: the disk has an error.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX

    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
