"""Open regular files only: a FIFO in place of a file would block its reader for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path | str, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading bytes.

    Args:
        path: the file; a link leads to its target.
        flags: further flags for `os.open`, such as `os.O_NOFOLLOW`.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file can't be opened, is not a regular file, or is a link to a missing file.
    """
    try:
        # O_NONBLOCK, because otherwise opening a FIFO would wait for a writer.
        descriptor = _opened(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP) or not os.path.islink(path):  # noqa: PTH114
            raise
        # For a link to a missing file, another error is raised: "No such file" would confuse a person who
        # sees the link in a listing.
        target = os.readlink(path)  # noqa: PTH115
        raise OSError(errno.EINVAL, f"it is a link to {target}", str(path)) from error

    # The open file is checked, not its path: another file may be renamed to this path at any time.
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        code = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(code, f"it is {_KINDS.get(kind, 'something else')} and no file", str(path))
    return open(descriptor, "rb")


def _opened(path: Path | str, flags: int) -> int:
    """Open a file and return its descriptor; after ESTALE ("Stale file handle"), try once more.

    This error means that the host has cached a file that another host has replaced.
    """
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise

    # Listing the folder makes GlusterFS drop the cached file.
    os.listdir(os.path.dirname(path) or ".")  # noqa: PTH208, PTH120
    return os.open(path, flags)


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as for `open_regular`.
    """
    with open_regular(path) as stream:
        return stream.read()
