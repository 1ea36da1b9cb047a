"""Compare the ends of two trainings: the bytes of the weights, and every loss."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.checkpoint.files.manifest import TENSORS_FILE, checkpoint_folders, verify
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status import metrics


@dataclass(frozen=True)
class End:
    """The end of a training: its last checkpoint, verified, and the loss of every step."""

    step: int
    weights: str
    """Hash of the file that holds all tensors: weights, optimizer, random state."""
    losses: tuple[float, ...]
    held_out: tuple[float, ...]


def end_of(folder: RunFolder) -> End:
    """Return what a run ended with; CheckpointError when its newest checkpoint is not whole."""
    folders = checkpoint_folders(folder.checkpoints_dir)
    if not folders:
        raise CheckpointError(f"{folder.name} has no checkpoint.")
    manifest = verify(folders[0])
    logged = metrics.read(folder)
    weights = manifest.files[TENSORS_FILE].digest
    return End(manifest.step, weights, logged.train.values, logged.held_out.values)


def difference(end: End, reference: End) -> str:
    """Return the first difference of a disturbed training from the undisturbed one; empty without any."""
    if end.step != reference.step:
        return f"its last checkpoint is of step {end.step}, not {reference.step}"
    for name, mine, theirs in (
        ("loss", end.losses, reference.losses),
        ("held-out loss", end.held_out, reference.held_out),
    ):
        if len(mine) != len(theirs):
            return f"it logged {name} {len(mine)} times, not {len(theirs)}"
        for at, (one, other) in enumerate(zip(mine, theirs, strict=True), 1):
            if one != other:
                return f"{name} number {at} is {one!r}, not {other!r}"
    return "" if end.weights == reference.weights else "its losses are the same, its weights are not"
