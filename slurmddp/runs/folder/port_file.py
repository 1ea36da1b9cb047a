"""The port of a process to which others connect, in the attempt's folder.

The others look for it at ports that follow from the launch. If programs of others hold all of these ports,
the process takes a free port and leaves its number here. The others ask for the same proof there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from slurmddp.runs.folder.layout import write_atomic
from slurmddp.runs.folder.run_context import RunContext


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
    run = RunContext.read(os.environ if environ is None else environ)
    if run.folder is None:
        return None
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return run.folder.log_dir(run.attempt) / f"port-{name}"
