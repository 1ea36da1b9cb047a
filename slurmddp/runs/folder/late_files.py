"""Files that another host writes: one way to ask for them, which no cache of a network file system misleads.

A client of a network file system remembers for up to a minute that a name did not exist. So a look-up by name
of a file that is to appear hides the file: from the next look-up, and from SLURM, which then can't open a log
in a folder that exists. A listing of the folder leaves no such entry. The client opens the folder for it, and
asks its server on that occasion (NFS: close-to-open consistency).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slurmddp.host.regular_file import read_regular


def names_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder; none if it does not exist or can't be read."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        return frozenset()


def is_there(path: Path) -> bool:
    """Return whether `path` exists, by a listing of its folder; False if that can't be read."""
    return path.name in names_in(path.parent)


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


def look_again(folder: Path) -> None:
    """Make the next listing of a folder a fresh one, where a mount keeps listings (sshfs, long `actimeo`).

    A client drops what it remembers of a folder when it changes the folder itself, so this sets its times.
    Call it before a decision that can't be repeated, not in a poll: it writes.
    """
    with suppress(OSError):
        os.utime(folder)
