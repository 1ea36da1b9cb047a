"""Waits until this host's file system shows the checkpoint that rank 0 has chosen on its own."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from pathlib import Path

from slurmddp.checkpoint.files.manifest import MANIFEST_FILE
from slurmddp.checkpoint.files.retry import TRANSIENT
from slurmddp.errors import CheckpointError

WAITS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""A minute together: as long as NFS, by default, may believe in what it knew of a folder."""

log = logging.getLogger(__name__)


def mark_of(folder: Path) -> str:
    """Return what tells this checkpoint from any other, one of the same step included; OSError if unseen."""
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def await_same(folder: Path, mark: str) -> None:
    """Return once `folder` is the checkpoint with that mark; raises CheckpointError that names this host."""
    for wait_s in (*WAITS_S, None):
        seen = _seen(folder, mark)
        if not seen:
            return
        if wait_s is None:
            break
        log.info("%s %s on %s; looking again in %g s.", folder, seen, socket.gethostname(), wait_s)
        time.sleep(wait_s)
    raise CheckpointError(
        f"Rank 0 resumes from {folder}, which {seen} on {socket.gethostname()}, "
        f"also after {sum(WAITS_S):.0f} s.",
        hint="Put the run folder on a filesystem that all nodes share.",
    )


def _seen(folder: Path, mark: str) -> str:
    """Return "" when the checkpoint is there, else what is seen in its place."""
    try:
        os.listdir(folder.parent)  # noqa: PTH208 - opening the folder makes network file systems ask again.
        return "" if mark_of(folder) == mark else "is an older one of that step"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        if error.errno not in TRANSIENT:
            raise CheckpointError(
                f"Rank 0 resumes from {folder}, which can't be read on {socket.gethostname()}: "
                f"{error.strerror}.",
                hint="Check that this host may read the run folder.",
            ) from error
        return f"can't be read ({error.strerror})"
