"""Find the type of the file system that holds a path."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def file_system_type(path: Path) -> str:
    """Return the type of the file system of `path`, such as ext4, nfs4 or fuse.sshfs; empty if not known.

    Raises:
        OSError: `path` can't be examined.
    """
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        # Mount points may contain any bytes, and latin-1 decodes them all. The kernel escapes only blanks and
        # line ends.
        mounts = _MOUNTS.read_text(encoding="latin-1").split("\n")
    except OSError:
        return ""

    # The third field is the device. The file system type follows the field "-", which ends a variable number
    # of optional fields.
    for line in filter(None, mounts):
        fields = line.split(" ")
        if fields[2] == name:
            return fields[fields.index("-") + 1]

    return ""
