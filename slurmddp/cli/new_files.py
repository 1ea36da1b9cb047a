"""Write files of a project, and never change a file that exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path


def write_new(folder: Path, files: Mapping[Path, str]) -> Iterator[str]:
    """Write files that do not exist yet.

    Args:
        folder: the project.
        files: texts by their paths in the project.

    Yields:
        A line about each file, after it is written or kept.
    """
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            yield f"kept    {name} (exists; not changed)"
        else:
            yield f"wrote   {name}"
