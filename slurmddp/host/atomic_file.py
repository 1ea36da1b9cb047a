"""Replace a file at once: a reader sees the old content or the new content, never a mixture."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from slurmddp.host.file_lock import try_lock


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file, which replaces `path` at the end; after an error `path` is unchanged."""
    # With a random name and without following links, no account that may write to the folder can redirect the
    # bytes to another file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    try:
        with open(descriptor, "wb") as stream:
            # The lock shows that the writer lives: leftover temporary files are removed only if they are not
            # locked.
            try_lock(stream)
            yield stream

            # The content must be on disk before the rename: otherwise a crash of the host could leave an
            # empty file.
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that readers see either the old or the new content (see `replacing`)."""
    with replacing(path) as stream:
        stream.write(text.encode())
