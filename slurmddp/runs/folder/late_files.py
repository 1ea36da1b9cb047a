"""Read files that another host writes, and create files that another host may create.

A client of a network file system remembers for up to a minute that a name did not exist. A look-up by name of
a file that is to appear therefore hides the file: from the next look-up, and from SLURM, which then can't
open a log in a folder that exists. A listing of the folder leaves no such entry. To list a folder, the client
opens it, and then asks its server (NFS: close-to-open consistency).

Some clients (GlusterFS) also remember to which file a name led. They then show the old size of a file that
has grown, and answer "Stale file handle" for a file that was replaced. A listing corrects that as well.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from slurmddp.host.regular_file import read_regular


def names_in(folder: Path) -> frozenset[str]:
    """Return the names of the entries of a folder; empty if the folder does not exist or can't be read."""
    try:
        return _listed(folder)
    except OSError:
        return frozenset()


def is_there(path: Path) -> bool:
    """Return whether a listing of its folder contains `path`; False if the folder does not exist."""
    try:
        return path.name in _listed(path.parent)
    except PermissionError:
        # An account may have the right to open files in a folder that it can't list.
        return os.path.lexists(path)
    except OSError:
        return False


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist or can't be read."""
    if not is_there(path):
        return None
    try:
        return read_regular(path)
    except OSError:
        return None


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist or can't be read."""
    content = read_bytes(path)
    return None if content is None else content.decode("utf-8", errors="replace")


def _listed(folder: Path) -> frozenset[str]:
    with os.scandir(folder) as entries:
        return frozenset(entry.name for entry in entries)


def look_again(folder: Path) -> None:
    """Make this host's file system client drop its caches of a folder and of the files in it.

    Call this function before a decision that can't be repeated, but not in a poll: it changes the folder's
    times.
    """
    # A client that caches listings (sshfs, NFS with a long `actimeo`) drops them when it changes the folder.
    with suppress(OSError):
        os.utime(folder)
    # A client that caches files (GlusterFS) refreshes them when it lists the folder.
    names_in(folder)


def create_new(path: Path, mode: int) -> int:
    """Create a file and return its descriptor for writing; of several callers, on any host, one succeeds.

    Raises:
        FileExistsError: the name exists already.
        OSError: the file can't be created.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except PermissionError as error:
        # sshfs reports EPERM if another host created the name at the same moment. Look-ups then miss the name
        # for a while, so the folder is listed.
        look_again(path.parent)
        if error.errno != errno.EPERM or not is_there(path):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
