"""Give a file a second name, or a copy where the filesystem has no hard links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(path: Path, link: Path) -> None:
    """Make a hard link; copy the file on a filesystem without hard links, or to a different one."""
    try:
        os.link(path, link, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(path, link, follow_symlinks=False)
