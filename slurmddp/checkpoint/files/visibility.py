"""Wait until the file system of this host shows the checkpoint that rank 0 has chosen."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from pathlib import Path

from slurmddp.checkpoint.files.manifest import MANIFEST_FILE, load_manifest
from slurmddp.checkpoint.files.retry import TRANSIENT
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.late_files import is_there

WAITS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before each retry: a minute in total, the longest time for which NFS caches a folder by default."""

_OTHER = "has another manifest"
"""The problem of a host that still caches an older checkpoint of the step, or that sees a damaged one."""

log = logging.getLogger(__name__)


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest; it identifies the content of the checkpoint.

    Raises:
        OSError: the manifest can't be read.
    """
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def wait_until_visible(folder: Path, expected: str) -> None:
    """Wait until this host sees the checkpoint `folder` with the fingerprint `expected`.

    Raises:
        CheckpointError: this host did not see it within about a minute (WAITS_S), or can't read the folder.
        DamagedError: the manifest that this host sees is damaged.
    """
    host = socket.gethostname()
    for wait_s in WAITS_S:
        problem = _problem(folder, expected)
        if not problem:
            return
        log.info("%s %s on %s; trying again in %g s.", folder, problem, host, wait_s)
        time.sleep(wait_s)

    problem = _problem(folder, expected)
    if problem == _OTHER:
        # Rank 0 may have read an undamaged copy from the cache of its host.
        load_manifest(folder)
    if problem:
        raise CheckpointError(
            f"Rank 0 resumes from {folder}, which {problem} on {host}, even after {sum(WAITS_S):.0f} s.",
            hint="Put the run folder on a file system that all nodes share.",
        )


def _problem(folder: Path, expected: str) -> str:
    """Return the reason why this host does not see the checkpoint, such as "does not exist"; else empty.

    Raises:
        CheckpointError: an error that is not transient.
    """
    try:
        # Check both folders: the parent may be as new as the checkpoint, and this host may not see it yet.
        if not (is_there(folder.parent) and is_there(folder)):
            return "does not exist"
        if fingerprint(folder) != expected:
            return _OTHER
        return ""
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        if error.errno not in TRANSIENT:
            raise CheckpointError(
                f"Rank 0 resumes from {folder}, which can't be read on {socket.gethostname()}: "
                f"{error.strerror}.",
                hint="Check that your account can read the run folder on this host.",
            ) from error
        return f"can't be read ({error.strerror})"
