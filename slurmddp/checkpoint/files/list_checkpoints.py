"""List the checkpoints of a folder, usable or not, without a change to any of them."""

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
"""The name prefix of renamed checkpoints, by their state; these checkpoints are never loaded."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint folder, and whether it can be loaded."""

    step: int
    state: str
    """complete (names and sizes match the manifest), verified (all bytes match), damaged, other version
    (another slurmddp wrote it), quarantined (a load found it damaged), or abandoned (the training went back
    to an earlier step). The last two are never loaded."""
    bytes: int
    saved: float | None
    """Time of the last write to its files, in seconds since the epoch; None for an empty or unreadable
    folder."""
    latest: bool
    """Whether the file `latest` names this checkpoint."""
    path: Path
    problem: str | None = None
    """The reason why the checkpoint can't be loaded; None if it can be loaded."""
    world_size: int | None = None
    """Number of ranks of the training that saved the checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that were given to the save."""
    best: bool = False
    """Whether this is the best checkpoint by `train.best` of the run."""


def list_checkpoints(root: Path, *, hashed: bool = False) -> list[ListedCheckpoint]:
    """Return the checkpoints under `root`, newest first, then quarantined and abandoned checkpoints.

    Args:
        root: the folder of all checkpoints.
        hashed: whether to compare every byte with the manifest, and not only names and sizes.
    """
    latest = _name_in_pointer(root)
    checkpoints = [_listed(folder, hashed, latest) for folder in checkpoint_folders(root)]

    by = best_of_run(root)
    if by is not None:
        loadable = {checkpoint.path for checkpoint in checkpoints if _is_loadable(checkpoint)}
        best = next((folder for folder in ranked(root, by) if folder in loadable), None)
        checkpoints = [replace(checkpoint, best=checkpoint.path == best) for checkpoint in checkpoints]

    # A running training may have deleted a checkpoint since its folder was listed.
    present = [checkpoint for checkpoint in checkpoints if checkpoint.path.is_dir()]
    return present + [
        ListedCheckpoint(step, state, *_size_and_time(path), False, path)
        for state, prefix in RENAMED.items()
        for step, path in renamed_folders(root, prefix)
    ]


def _is_loadable(checkpoint: ListedCheckpoint) -> bool:
    return checkpoint.state in ("complete", "verified")


def best_of_run(root: Path) -> Best | None:
    """Return `train.best` of the run whose checkpoints are in `root`; None without such a run or setting."""
    # `root` may belong to no run, or its configuration may be unreadable.
    with suppress(SlurmddpError, OSError, ValueError):
        train = RunFolder(root.parent).config().get("train")
        if isinstance(train, dict) and train.get("best") is not None:
            return parse_best(str(train["best"]))

    return None


def best_whole(root: Path, best: Best) -> Path | None:
    """Return the undamaged checkpoint with the best metric, or None; do not rename or repair anything."""
    for folder in ranked(root, best):
        if _listed(folder, True, "").state == "verified":
            return folder

    return None


def newest_whole(root: Path) -> Path | None:
    """Return the newest undamaged checkpoint, or None; do not rename or repair anything.

    Raises:
        OtherVersionError: a newer checkpoint has a format that this version of slurmddp can't read.
    """
    for folder in checkpoint_folders(root):
        checkpoint = _listed(folder, True, "")
        if checkpoint.state == "verified":
            return folder
        if checkpoint.state == OTHER_VERSION:
            raise OtherVersionError(f"Checkpoint {folder} is not usable: {checkpoint.problem}")

    return None


def _listed(folder: Path, hashed: bool, latest: str) -> ListedCheckpoint:
    """Check a checkpoint and describe it.

    Args:
        folder: the folder of the checkpoint.
        hashed: as in `list_checkpoints`.
        latest: the name in the file `latest`; empty if it is unknown.
    """
    manifest = None
    problem = None
    state = "damaged"
    try:
        manifest = verify(folder) if hashed else _check_sizes(folder)
        state = "verified" if hashed else "complete"
    except OtherVersionError as error:
        state = OTHER_VERSION
        problem = str(error)
    except CheckpointError as error:
        problem = error.message
    except OSError as error:
        problem = f"It can't be read: {error.strerror or error}."

    meta = manifest.meta if manifest else {}
    size, saved = _size_and_time(folder)
    return ListedCheckpoint(
        step=step_of(folder) or 0,
        state=state,
        bytes=size,
        saved=saved,
        latest=folder.name == latest,
        path=folder,
        problem=problem,
        world_size=meta.get("world_size"),
        metrics=meta.get("metrics", {}),
    )


def _check_sizes(folder: Path) -> Manifest:
    """Compare names and sizes of the files with the manifest, and return the manifest.

    Raises:
        CheckpointError: the manifest is damaged, or a file is missing or has another size.
        OSError: a file can't be read.
    """
    manifest = load_manifest(folder)
    for name, expected in manifest.files.items():
        check_size(folder / name, expected)

    return manifest


def _name_in_pointer(root: Path) -> str:
    """Return the name of a checkpoint that the file `latest` contains; empty if the file can't be read."""
    try:
        return read_regular(root / POINTER_FILE).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _size_and_time(folder: Path) -> tuple[int, float | None]:
    """Return the size of a checkpoint in bytes, and the time of the last write to its files.

    The time is in seconds since the epoch. An empty or unreadable folder gives 0 and None.
    """
    try:
        stats = [path.stat() for path in folder.iterdir()]
    except OSError:
        stats = []

    size = sum(stat.st_size for stat in stats)
    saved = max((stat.st_mtime for stat in stats), default=None)
    return size, saved
