"""Give a file a second name, or make a copy on a file system without hard links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(path: Path, link: Path) -> None:
    """Make a hard link; copy the file if the file system has no hard links, or `link` is on another one."""
    try:
        os.link(path, link, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(path, link, follow_symlinks=False)
