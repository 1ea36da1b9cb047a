"""Waits until the file system of this host shows the checkpoint that rank 0 has chosen."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from pathlib import Path

from slurmddp.checkpoint.files.manifest import MANIFEST_FILE
from slurmddp.checkpoint.files.retry import TRANSIENT
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.late_files import is_there

WAITS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before each retry: a minute in all, the longest time for which NFS caches a folder by default."""

log = logging.getLogger(__name__)


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the manifest, which differs between any two checkpoints; raises OSError."""
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def wait_until_visible(folder: Path, expected: str) -> None:
    """Wait until `folder` has the fingerprint `expected`; raises CheckpointError after about a minute."""
    waits_s = iter(WAITS_S)
    while problem := _problem(folder, expected):
        wait_s = next(waits_s, None)
        if wait_s is None:
            raise CheckpointError(
                f"Rank 0 resumes from {folder}, which {problem} on {socket.gethostname()}, "
                f"also after {sum(WAITS_S):.0f} s.",
                hint="Put the run folder on a filesystem that all nodes share.",
            )
        log.info("%s %s on %s; trying again in %g s.", folder, problem, socket.gethostname(), wait_s)
        time.sleep(wait_s)


def _problem(folder: Path, expected: str) -> str:
    """Return "" if the checkpoint is visible, else the reason why not."""
    try:
        # The folder of all checkpoints may be as new as the checkpoint.
        if not (is_there(folder.parent) and is_there(folder)):
            return "does not exist"
        return "" if fingerprint(folder) == expected else "is an older one of that step"
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
