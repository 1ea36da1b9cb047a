"""Lists the checkpoints of a folder, good and bad, without a change to any of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files.manifest import (
    ABANDONED,
    BAD,
    POINTER_FILE,
    Manifest,
    OtherVersionError,
    check_size,
    checkpoint_folders,
    load_manifest,
    renamed_folders,
    step_of,
    verify,
)
from slurmddp.errors import CheckpointError, RunNotFoundError
from slurmddp.runs import index

OTHER_VERSION = "other version"
RENAMED = {"quarantined": BAD, "abandoned": ABANDONED}
"""States of renamed checkpoints, which no load uses, and the prefixes of their names."""


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    `state` is one of: `complete` (names and sizes fit), `verified` (every byte fits), `damaged`,
    `other version` (another slurmddp wrote it), `quarantined` (found damaged), `abandoned` (of
    steps that the training has left). The last two are never loaded.
    """

    step: int
    state: str
    size: int
    saved: float | None
    is_latest: bool
    path: Path
    problem: str = ""
    world_size: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "state": self.state,
            "bytes": self.size,
            "saved": self.saved,
            "latest": self.is_latest,
            "world_size": self.world_size,
            "problem": self.problem or None,
            "path": str(self.path),
        }


def find_root(name: str) -> Path:
    """Return the checkpoints folder of the run `name`, or the folder `name` if it holds checkpoints."""
    try:
        return index.find(name).checkpoints_dir
    except RunNotFoundError:
        path = Path(name).absolute()
        if name and path.is_dir() and rows(path):
            return path
        raise


def rows(root: Path, *, hashed: bool = False) -> list[Row]:
    """Return the checkpoints under `root`, newest first, then the renamed; `hashed` reads every byte."""
    pointed = _pointed(root)
    found = [_row(folder, hashed, pointed) for folder in checkpoint_folders(root)]
    # Retention may have deleted a folder meanwhile.
    good = [row for row in found if row.path.is_dir()]
    return good + [
        Row(step, state, *_size_and_time(path), False, path)
        for state, prefix in RENAMED.items()
        for step, path in renamed_folders(root, prefix)
    ]


def newest_whole(root: Path) -> Path | None:
    """Return the newest checkpoint that verifies, or None; changes nothing.

    Raises:
        OtherVersionError: a newer checkpoint is whole, but only another slurmddp can read it.
    """
    for folder in checkpoint_folders(root):
        row = _row(folder, True, "")
        if row.state == "verified":
            return folder
        if row.state == OTHER_VERSION:
            raise OtherVersionError(f"Checkpoint {folder} is not usable: {row.problem}")
    return None


def _row(folder: Path, hashed: bool, pointed: str) -> Row:
    manifest, problem, state = None, "", "damaged"
    try:
        manifest = verify(folder) if hashed else _sizes_fit(folder)
        state = "verified" if hashed else "complete"
    except OtherVersionError as error:
        problem, state = str(error), OTHER_VERSION
    except CheckpointError as error:
        problem = error.message
    except OSError as error:
        problem = f"It can't be read: {error.strerror or error}."
    world_size = manifest.meta.get("world_size") if manifest else None
    is_latest = folder.name == pointed
    facts = _size_and_time(folder)
    return Row(step_of(folder) or 0, state, *facts, is_latest, folder, problem, world_size)


def _sizes_fit(folder: Path) -> Manifest:
    manifest = load_manifest(folder)
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)
    return manifest


def _pointed(root: Path) -> str:
    try:
        return (root / POINTER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _size_and_time(folder: Path) -> tuple[int, float | None]:
    """Return the bytes of a checkpoint, and when its last file was written, in seconds since the epoch.

    0 and None if the folder is empty or unreadable.
    """
    try:
        stats = [path.stat() for path in folder.iterdir()]
    except OSError:
        stats = []
    return sum(one.st_size for one in stats), max((one.st_mtime for one in stats), default=None)
