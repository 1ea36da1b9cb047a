"""Write the weights of a run to a plain safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmddp.checkpoint.files.export import export_weights
from slurmddp.checkpoint.files.listing import best_of_run, best_whole, newest_whole
from slurmddp.checkpoint.files.manifest import checkpoint_folders, step_of
from slurmddp.control.checkpoints import checkpoints_folder
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import parse_best


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file of weights that was written."""

    path: Path
    checkpoint: Path
    """The folder of the checkpoint."""
    step: int | None
    model: str
    """The name under which the model was saved; `ema`: the averaged weights."""
    tensors: int
    """Number of tensors."""
    size_bytes: int
    """Size of the file."""
    damaged: Path | None = None
    """The newest checkpoint, if it is damaged, so that an older one was taken."""


def export(
    name: str | None = None,
    *,
    step: int | None = None,
    best: str | None = None,
    output: Path | None = None,
    model: str | None = None,
    force: bool = False,
) -> Exported:
    """Write the tensors of a saved model to a file.

    Args:
        name: name of a run, its beginning, or a run's folder; or a folder that holds checkpoints; None: the
            newest run.
        step: step of the checkpoint; None: the newest undamaged one.
        best: takes the best undamaged checkpoint by this metric, such as "max accuracy"; empty: by
            `train.best` of the run; None: `step` says which.
        output: the file to write; None: RUN-step-N.safetensors in this folder.
        model: name of the model; None: "ema" if the run has averaged weights, else "model", else the only
            one.
        force: whether to replace an existing file.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
        CheckpointError: there is no such checkpoint, or it is damaged; nothing was written.
        ConfigError: there is no such step or model, no metric is named, or the file exists; nothing was
            written.
        SlurmddpError: the file can't be written.
    """
    root = checkpoints_folder(name)
    damaged = None
    if best is not None:
        folder = _best(root, best)
    elif step is not None:
        folder = _of_step(root, step)
    else:
        folder, damaged = _newest(root)

    step = step_of(folder)
    owner = root.parent.name if root.name == RunFolder.checkpoints_dir.name else root.name
    output = output or Path(f"{owner}-step-{step}.safetensors")
    try:
        model, tensors = export_weights(folder, output, model=model, force=force)
    except CheckpointError as problem:
        raise CheckpointError(f"Checkpoint {folder}: {problem.message}", hint=problem.hint) from problem
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror or error}.") from error
    return Exported(
        path=output,
        checkpoint=folder,
        step=step,
        model=model,
        tensors=len(tensors),
        size_bytes=output.stat().st_size,
        damaged=damaged,
    )


def _best(root: Path, text: str) -> Path:
    by = parse_best(text) if text else best_of_run(root)
    if by is None:
        raise ConfigError(
            f"The run of {root} has no `train.best`.", hint='Name the metric: --best "min eval_loss".'
        )
    if (folder := best_whole(root, by)) is None:
        raise CheckpointError(
            f"No undamaged checkpoint in {root} has the metric {by[0]}.",
            hint="`slurmddp checkpoints RUN --json` shows the metrics of each.",
        )
    return folder


def _of_step(root: Path, step: int) -> Path:
    folders = {step_of(folder): folder for folder in _all(root)}
    if step not in folders:
        listed = ", ".join(map(str, folders))
        raise ConfigError(f"There is no checkpoint of step {step}.", hint=f"There are: {listed}.")
    return folders[step]


def _newest(root: Path) -> tuple[Path, Path | None]:
    """Return the newest undamaged checkpoint, and the newest one if that is damaged."""
    folders = _all(root)
    newest = newest_whole(root)
    if newest is None:
        raise CheckpointError(
            f"None of the {len(folders)} checkpoints in {root} verifies.",
            hint="`slurmddp checkpoints RUN --verify` shows the damage of each.",
        )
    return newest, None if newest == folders[0] else folders[0]


def _all(root: Path) -> list[Path]:
    folders = checkpoint_folders(root)
    if not folders:
        raise CheckpointError(f"There are no checkpoints in {root}.", hint="The run has not saved one yet.")
    return folders
