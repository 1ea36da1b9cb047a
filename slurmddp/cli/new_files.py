"""Write the files of a project without changing a file that exists, and the schemas for editors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slurmddp.errors import ConfigError, plain
from slurmddp.host.atomic_file import write_atomic


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
        with _explained(path):
            is_new = _write(path, text)

        yield f"wrote   {name}" if is_new else f"kept    {name} (exists; not changed)"


def write_schemas(folder: Path) -> str:
    """Write the JSON Schemas by which editors complete and check the YAML files of a project.

    Schemas that another version of slurmddp wrote are replaced.

    Args:
        folder: the project folder.

    Returns:
        The line to print: `wrote PATH` or `kept PATH`.

    Raises:
        ConfigError: a schema can't be written.
    """
    # Imported here, because only the commands that write a project need the schemas.
    from slurmddp.settings.json_schema import FOLDER, schemas

    place = Path("conf") / FOLDER
    is_changed = False
    for name, schema in schemas().items():
        path = folder / place / f"{name}.json"
        text = json.dumps(schema, indent=1) + "\n"
        with _explained(path):
            if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
            is_changed = True

    return f"wrote   {place} (for editors)" if is_changed else f"kept    {place} (up to date)"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert an OSError of the block to a ConfigError: the file can't be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path.absolute()} can't be written: {plain(error)}.",
            hint="Choose a folder in which you may write, or free some disk space.",
        ) from error


def _write(path: Path, text: str) -> bool:
    """Write a file if it does not exist yet; return whether it was written."""
    if os.path.lexists(path):
        return False

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)

    return True
