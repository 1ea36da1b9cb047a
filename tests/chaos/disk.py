"""A small disk of its own for the run folders, and filling it: a file system in memory, which needs root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slurmddp.errors import ConfigError

FILLER = "filler"


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount an empty file system of that size on `folder` for a while."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "slurmddp-chaos", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"{words[0]} failed: {done.stderr.strip()}", hint="Leave fill-disk out of --kinds.")


@contextlib.contextmanager
def full(folder: Path, spare_bytes: int = 0) -> Iterator[None]:
    """Leave no more than about `spare_bytes` free on the disk of `folder` for a while."""
    filler = folder / FILLER
    try:
        stream = filler.open("wb", buffering=0)
        # GlusterFS may report only at the truncation or the close that a write did not fit.
        with contextlib.suppress(OSError), stream:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        stream.write(bytes(size))
            stream.truncate(max(0, stream.tell() - spare_bytes))
        yield
    finally:
        filler.unlink(missing_ok=True)
