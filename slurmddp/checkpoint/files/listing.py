"""Lists the checkpoints of a folder, good and bad, without a change to any of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files.manifest import (
    BAD,
    POINTER_FILE,
    Manifest,
    OtherVersionError,
    check_size,
    checkpoint_folders,
    load_manifest,
    verify,
)
from slurmddp.errors import CheckpointError, RunNotFoundError
from slurmddp.runs import index

OTHER_VERSION, QUARANTINED = "other version", "quarantined"
_BAD_FOLDER = re.compile(re.escape(BAD) + r"step-(\d{10,})(-\d+)?")


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    `state` is one of: `complete` (names and sizes fit), `verified` (every byte fits), `damaged`,
    `other version` (another slurmddp wrote it), `quarantined` (found damaged, never loaded).
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
    """Return the checkpoints under `root`, newest first, then the quarantined; `hashed` reads every byte."""
    pointed = _pointed(root)
    found = [_row(folder, hashed, pointed) for folder in checkpoint_folders(root)]
    # Retention may have deleted a folder meanwhile.
    good = [row for row in found if row.path.is_dir()]
    return good + _quarantined(root)


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
    step = int(folder.name.removeprefix("step-"))
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
    return Row(step, state, _bytes(folder), _saved(folder), is_latest, folder, problem, world_size)


def _sizes_fit(folder: Path) -> Manifest:
    manifest = load_manifest(folder)
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)
    return manifest


def _quarantined(root: Path) -> list[Row]:
    if not root.is_dir():
        return []
    named = [(match, path) for path in root.iterdir() if (match := _BAD_FOLDER.fullmatch(path.name))]
    found = [
        Row(int(match[1]), QUARANTINED, _bytes(path), _saved(path), False, path) for match, path in named
    ]
    return sorted(found, key=lambda row: (-row.step, row.path.name))


def _pointed(root: Path) -> str:
    try:
        return (root / POINTER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def _saved(folder: Path) -> float | None:
    """Return when the checkpoint's last file was written, in seconds since the epoch; None if unreadable."""
    try:
        return max(path.stat().st_mtime for path in folder.iterdir())
    except (OSError, ValueError):
        return None
