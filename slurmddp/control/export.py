"""Write the weights of a run to a plain safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmddp.checkpoint.files.export import export_weights
from slurmddp.checkpoint.files.list_checkpoints import best_of_run, best_whole, newest_whole
from slurmddp.checkpoint.files.manifest import checkpoint_folders, step_of
from slurmddp.control.checkpoints import checkpoints_folder
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import parse_best


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of `export`: the written file of weights, and the checkpoint that contained them."""

    path: Path
    checkpoint: Path
    """The folder of the checkpoint."""
    step: int | None
    model: str
    """The name under which the model was saved; `ema` is the name of averaged weights."""
    tensors: int
    """Number of tensors."""
    size_bytes: int
    """Size of the file."""
    damaged: Path | None = None
    """The newest checkpoint, if it is damaged and an older one was exported instead."""


def export(
    name: str | None = None,
    *,
    step: int | None = None,
    best: str | None = None,
    output: Path | None = None,
    model: str | None = None,
    force: bool = False,
) -> Exported:
    """Write the tensors of a model from a checkpoint to a safetensors file.

    Args:
        name: name of a run, the beginning of a name, a run folder, or a folder that holds checkpoints; None:
            the newest run.
        step: step of the checkpoint; None: the newest undamaged checkpoint.
        best: metric by which the best undamaged checkpoint is chosen, such as "max accuracy"; empty: the
            metric of the run's `train.best`; None: the checkpoint is chosen by `step`.
        output: the file to write; None: RUN-step-N.safetensors in the current folder.
        model: name of the model; None: "ema" if averaged weights were saved, else "model", else the only
            saved model.
        force: whether to replace an existing file.

    Returns:
        The file that was written, and the checkpoint from which it was written.

    Raises:
        RunNotFoundError: the name matches no run, or several.
        CheckpointError: there is no such checkpoint, or it is damaged; nothing was written.
        ConfigError: there is no such step or model, the run has no `train.best`, or the file exists; nothing
            was written.
        SlurmddpError: the file can't be written.
    """
    root = checkpoints_folder(name)
    damaged = None
    if best is not None:
        folder = _best_checkpoint(root, best)
    elif step is not None:
        folder = _checkpoint_of_step(root, step)
    else:
        folder, damaged = _newest(root)

    step = step_of(folder)
    owner = root.parent.name if root.name == RunFolder.checkpoints_dir.name else root.name
    output = output or Path(f"{owner}-step-{step}.safetensors")

    try:
        model, tensors = export_weights(folder, output, model=model, force=force)
    except CheckpointError as error:
        raise CheckpointError(f"Checkpoint {folder}: {error.message}", hint=error.hint) from error
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


def _best_checkpoint(root: Path, text: str) -> Path:
    """Return the undamaged checkpoint with the best value of a metric.

    Args:
        root: the folder that holds the checkpoints.
        text: the metric, such as "max accuracy"; empty: the metric of the run's `train.best`.

    Raises:
        ConfigError: `text` is empty, and the run has no `train.best`.
        CheckpointError: no undamaged checkpoint has the metric.
    """
    metric = parse_best(text) if text else best_of_run(root)
    if metric is None:
        raise ConfigError(
            f"The metric is not given, and the run of {root} has no `train.best`.",
            hint='Name the metric: --best "min eval_loss".',
        )
    if (folder := best_whole(root, metric)) is None:
        raise CheckpointError(
            f"No undamaged checkpoint in {root} has the metric {metric[0]}.",
            hint="`slurmddp checkpoints RUN --json` prints the metrics of each checkpoint.",
        )

    return folder


def _checkpoint_of_step(root: Path, step: int) -> Path:
    """Return the checkpoint of a step; raise ConfigError if there is none."""
    folders = {step_of(folder): folder for folder in _all(root)}
    if step not in folders:
        listed = ", ".join(map(str, folders))
        raise ConfigError(
            f"There is no checkpoint of step {step}.", hint=f"The steps with a checkpoint: {listed}."
        )

    return folders[step]


def _newest(root: Path) -> tuple[Path, Path | None]:
    """Return the newest undamaged checkpoint.

    Returns:
        Its folder, and the folder of the newest checkpoint if this one is damaged, else None.

    Raises:
        CheckpointError: there is no checkpoint, or all are damaged.
    """
    folders = _all(root)
    newest = newest_whole(root)
    if newest is None:
        raise CheckpointError(
            f"All checkpoints in {root} are damaged ({len(folders)}).",
            hint="`slurmddp checkpoints RUN --verify` prints the damage of each checkpoint.",
        )

    damaged = None if newest == folders[0] else folders[0]
    return newest, damaged


def _all(root: Path) -> list[Path]:
    folders = checkpoint_folders(root)
    if not folders:
        raise CheckpointError(
            f"There are no checkpoints in {root}.", hint="Wait until the run has saved its first checkpoint."
        )
    return folders
