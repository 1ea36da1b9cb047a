"""List the checkpoints of a run, good and bad; nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmddp.checkpoint.files.listing import ListedCheckpoint, list_checkpoints
from slurmddp.errors import RunNotFoundError
from slurmddp.runs import index


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run."""

    folder: Path
    """The folder that holds them."""
    checkpoints: tuple[ListedCheckpoint, ...]
    """The newest first, then those that no load uses."""


def checkpoints(name: str, *, verify: bool = False) -> Checkpoints:
    """Return the checkpoints of a run, or of a folder.

    Args:
        name: name of a run, its beginning, or a run's folder; or a folder that holds checkpoints.
        verify: whether to compare every byte with what was written.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
    """
    folder = checkpoints_folder(name)
    return Checkpoints(folder, tuple(list_checkpoints(folder, hashed=verify)))


def checkpoints_folder(name: str | None) -> Path:
    """Return the checkpoints folder of a run, or the named folder if it holds checkpoints.

    Args:
        name: as for `checkpoints`; None: the newest run.

    Raises:
        RunNotFoundError: as for `checkpoints`.
    """
    try:
        return index.find(name).checkpoints_dir
    except RunNotFoundError:
        path = Path(name or "").absolute()
        if name and path.is_dir() and list_checkpoints(path):
            return path
        raise
