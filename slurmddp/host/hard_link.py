"""Give a file a second name, or make a copy on a file system without hard links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(path: Path, link: Path) -> None:
    """Create `link` as a hard link to the file `path`, or as a copy where hard links are not possible.

    Hard links are not possible on some file systems, nor if `link` is on another file system.
    """
    try:
        os.link(path, link, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(path, link, follow_symlinks=False)
