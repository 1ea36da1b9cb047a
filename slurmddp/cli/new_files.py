"""Write the files of a project without changing a file that exists."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.errors import ConfigError, plain


def write_new(folder: Path, files: Mapping[Path, str]) -> Iterator[str]:
    """Write the files that do not exist yet, and keep the files that exist.

    Args:
        folder: the project folder.
        files: the text of each file, by its path in the project.

    Yields:
        For each file the line to print about it: `wrote PATH` or `kept PATH`.

    Raises:
        ConfigError: a file can't be written.
    """
    for name, text in files.items():
        path = folder / name
        try:
            is_new = _write(path, text)
        except OSError as error:
            raise ConfigError(
                f"{path.absolute()} can't be written: {plain(error)}.",
                hint="Choose a folder in which you may write, or free some disk space.",
            ) from error

        yield f"wrote   {name}" if is_new else f"kept    {name} (exists; not changed)"


def _write(path: Path, text: str) -> bool:
    """Write a file if it does not exist yet; return whether it was written."""
    if os.path.lexists(path):
        return False

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)

    return True
