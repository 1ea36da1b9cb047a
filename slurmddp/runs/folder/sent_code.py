"""The list of the code that was sent to a folder of a login node: every file with its digest.

A snapshot of that folder copies the files of this list. The snapshot does not ask git on that node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.host.atomic_file import write_atomic

FOLDER = ".slurmddp"
"""Folder inside the project on the host, with the list of sent files, and the laptop's commit and diff."""
_LIST = "sent.json"
"""The name of the list of files of the last complete transfer."""
_PENDING = "pending.json"
"""The name of the list of files of a transfer that is in progress or was interrupted."""


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file or symbolic link of a project that was sent over ssh."""

    name: str
    """Path relative to the project, with slashes."""
    size: int
    digest: str
    """SHA-256 of the content, or of the target of a link."""
    mode: int = 0o644
    """The permissions of a file, without the right of other accounts to write."""
    link: str | None = None
    """The target of a symbolic link; None for a file."""

    @property
    def is_safe(self) -> bool:
        """Whether the name stays inside the folder that it is relative to."""
        path = PurePosixPath(self.name)
        return bool(path.parts) and not path.is_absolute() and ".." not in path.parts

    def matches(self, path: Path) -> bool:
        """Return whether `path` is this file or link, whatever its mode is."""
        if path.is_symlink() or self.link is not None:
            return path.is_symlink() and str(path.readlink()) == self.link
        return path.is_file() and path.stat().st_size == self.size and digest_of(path) == self.digest


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def from_json(entries: Sequence[dict[str, Any]]) -> list[SentFile]:
    """Return the files from values that `as_json` returned.

    Raises:
        ValueError: a name is an absolute path or contains `..`.
    """
    files = [SentFile(**entry) for entry in entries]
    for file in files:
        if not file.is_safe:
            raise ValueError(f"{file.name!r} is not a path inside the project")
    return files


def as_json(files: Sequence[SentFile]) -> list[dict[str, Any]]:
    """Return a dict for each file, which `from_json` reads."""
    return [asdict(file) for file in files]


def is_marked(project_dir: Path) -> bool:
    """Return whether code was ever sent to `project_dir` over ssh, even if the transfer was interrupted."""
    return any((project_dir / FOLDER / name).exists() for name in (_LIST, _PENDING))


def of(project_dir: Path) -> list[SentFile] | None:
    """Return the files of the last complete transfer to `project_dir`; None if there was none.

    Raises:
        ConfigError: the list can't be read.
    """
    return _read(project_dir / FOLDER / _LIST)


def known(project_dir: Path) -> list[SentFile]:
    """Return the files that earlier transfers may have written, interrupted transfers included."""
    files: list[SentFile] = []
    for name in (_LIST, _PENDING):
        # The files of a damaged list count as unknown: the next transfer renames them instead of overwriting
        # them.
        with suppress(ConfigError):
            files += _read(project_dir / FOLDER / name) or []
    return files


def begin(project_dir: Path, files: Sequence[SentFile]) -> None:
    """Record the files that a transfer is about to write, in addition to the files of earlier transfers."""
    # After an interruption, the next transfer must know these files; it would rename unknown files.
    _write(project_dir / FOLDER / _PENDING, [*known(project_dir), *files])


def complete(project_dir: Path, files: Sequence[SentFile]) -> None:
    """Record that a transfer is complete, and that `files` are all files of the code."""
    # In this order, an interruption leaves both lists. Together they may name too many files, but never too
    # few.
    _write(project_dir / FOLDER / _LIST, files)
    (project_dir / FOLDER / _PENDING).unlink(missing_ok=True)


def _read(path: Path) -> list[SentFile] | None:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}, the list of the code that was sent, can't be read: {error}.",
            hint="Send the code again, by `slurmddp train` or `slurmddp run` from your own machine.",
        ) from error


def _write(path: Path, files: Sequence[SentFile]) -> None:
    distinct = list(dict.fromkeys(files))
    write_atomic(path, json.dumps(as_json(distinct)))
