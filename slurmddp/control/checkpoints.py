"""List the checkpoints of a run, damaged ones too; nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmddp.checkpoint.files.list_checkpoints import ListedCheckpoint, list_checkpoints
from slurmddp.errors import RunNotFoundError
from slurmddp.runs import index


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in the folder of a run, also damaged ones."""

    folder: Path
    """The folder that contains the checkpoints."""
    checkpoints: tuple[ListedCheckpoint, ...]
    """All checkpoints, the newest first; quarantined and abandoned checkpoints come last."""


def checkpoints(name: str, *, verify: bool = False) -> Checkpoints:
    """List the checkpoints of a run or of a folder, also damaged ones.

    Args:
        name: name of a run, the beginning of a name, a run folder, or a folder that holds checkpoints.
        verify: whether to read every byte and compare it with its checksum.

    Raises:
        RunNotFoundError: the name matches no run, or several.
    """
    folder = checkpoints_folder(name)
    return Checkpoints(folder, tuple(list_checkpoints(folder, hashed=verify)))


def checkpoints_folder(name: str | None) -> Path:
    """Return the checkpoints folder of a run, or the named folder if it holds checkpoints.

    Args:
        name: name of a run, the beginning of a name, a run folder, or a folder that holds checkpoints; None:
            the newest run.

    Raises:
        RunNotFoundError: the name matches no run, or several, and is no folder with checkpoints.
    """
    try:
        return index.find(name).checkpoints_dir
    except RunNotFoundError:
        path = Path(name or "").absolute()
        if name and path.is_dir() and list_checkpoints(path):
            return path
        raise
