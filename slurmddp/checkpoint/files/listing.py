"""Lists the checkpoints of a folder, good and bad, without a change to any of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmddp.checkpoint.files.best_by_metric import Best, ranked
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
from slurmddp.errors import CheckpointError, SlurmddpError
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import parse_best

OTHER_VERSION = "other version"
RENAMED = {"quarantined": BAD, "abandoned": ABANDONED}
"""States of renamed checkpoints, which no load uses, and the prefixes of their names."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint of a run."""

    step: int
    state: str
    """complete (names and sizes fit), verified (every byte fits), damaged, other version (another slurmddp
    wrote it), quarantined (found damaged), or abandoned (of steps that the training has left). The last two
    are never loaded."""
    bytes: int
    saved: float | None
    """When its last file was written, in seconds since the epoch."""
    latest: bool
    """Whether a load tries it first."""
    path: Path
    problem: str | None = None
    """Why it can't be loaded."""
    world_size: int | None = None
    """Number of ranks that have saved it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that were given to the save."""
    best: bool = False
    """Whether it is the best one by `train.best` of the run."""


def list_checkpoints(root: Path, *, hashed: bool = False) -> list[ListedCheckpoint]:
    """Return the checkpoints under `root`, newest first, then the renamed; `hashed` reads every byte."""
    pointed = _pointed(root)
    checkpoints = [_row(folder, hashed, pointed) for folder in checkpoint_folders(root)]
    by = best_of_run(root)
    if by is not None:
        loadable = {row.path for row in checkpoints if row.state in ("complete", "verified")}
        first = next((folder for folder in ranked(root, by) if folder in loadable), None)
        checkpoints = [replace(row, best=row.path == first) for row in checkpoints]

    # Retention may have deleted a folder meanwhile.
    present = [row for row in checkpoints if row.path.is_dir()]
    return present + [
        ListedCheckpoint(step, state, *_size_and_time(path), False, path)
        for state, prefix in RENAMED.items()
        for step, path in renamed_folders(root, prefix)
    ]


def best_of_run(root: Path) -> Best | None:
    """Return `train.best` of the run to which the checkpoints folder `root` belongs; None without it."""
    with suppress(SlurmddpError, OSError, ValueError):
        train = RunFolder(root.parent).config().get("train")
        text = train.get("best") if isinstance(train, dict) else None
        return None if text is None else parse_best(str(text))
    return None


def best_whole(root: Path, best: Best) -> Path | None:
    """Return the best checkpoint that verifies, or None; changes nothing."""
    return next((one for one in ranked(root, best) if _row(one, True, "").state == "verified"), None)


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


def _row(folder: Path, hashed: bool, pointed: str) -> ListedCheckpoint:
    manifest, problem, state = None, None, "damaged"
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
    metrics = manifest.meta.get("metrics", {}) if manifest else {}
    return ListedCheckpoint(
        step_of(folder) or 0, state, *facts, is_latest, folder, problem, world_size, metrics
    )


def _sizes_fit(folder: Path) -> Manifest:
    manifest = load_manifest(folder)
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)
    return manifest


def _pointed(root: Path) -> str:
    try:
        return read_regular(root / POINTER_FILE).decode("utf-8", errors="replace").strip()
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
