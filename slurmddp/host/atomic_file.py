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
    """Yield a new file beside `path` that replaces it at the end; after an error `path` is unchanged."""
    # With a random name and without following links, no account that may write to the folder can redirect the
    # bytes to another file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    try:
        with open(descriptor, "wb") as stream:
            # The removal of leftovers keeps a locked file: its writer lives.
            try_lock(stream)
            yield stream

            # The content must be on the disk before the name leads to it: a crash would leave an empty file.
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` by `replacing`."""
    with replacing(path) as stream:
        stream.write(text.encode())
