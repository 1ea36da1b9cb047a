"""The port of a process to which others connect, in the attempt's folder.

The others look for it at ports that follow from the launch. If programs of others hold all of these ports,
the process takes a free port and leaves its number here. The others ask for the same proof there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from slurmddp.environments.names import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.runs.folder.layout import RunFolder, write_atomic


def publish(identity: str, port: int, environ: Mapping[str, str] | None = None) -> bool:
    """Write the port of `identity`; return False where the attempt has no folder."""
    path = _path(identity, environ)
    try:
        if path is not None:
            write_atomic(path, f"{port}\n")
    except OSError:
        return False
    return path is not None


def published(identity: str, environ: Mapping[str, str] | None = None) -> list[int]:
    """Return the ports written for `identity`; empty without such a file."""
    path = _path(identity, environ)
    try:
        # Listing a folder makes a network file system ask its server.
        if path is None or path not in path.parent.iterdir():
            return []
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []


def _path(identity: str, environ: Mapping[str, str] | None) -> Path | None:
    environ = os.environ if environ is None else environ
    run_dir, attempt = environ.get(RUN_DIR_VARIABLE), environ.get(ATTEMPT_VARIABLE, "")
    if not run_dir or not attempt.isdecimal():
        return None
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return RunFolder(run_dir).log_dir(int(attempt)) / f"port-{name}"
