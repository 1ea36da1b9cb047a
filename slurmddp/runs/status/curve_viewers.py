"""The commands that show the curves which loggers have written into a run folder."""

from __future__ import annotations

import shlex

from slurmddp.runs.folder.layout import RunFolder


def curve_commands(folder: RunFolder) -> list[str]:
    """Return shell commands that show or upload what TensorBoard and Weights & Biases loggers have written.

    The list is empty if a run has no such files, or if all of them are uploaded.
    """
    commands = []
    if folder.tensorboard_dir.is_dir():
        commands.append(f"tensorboard --logdir {shlex.quote(str(folder.tensorboard_dir))}")

    wandb_dir = folder.loggers_dir / "wandb"
    offline = list(wandb_dir.glob("offline-run-*"))
    # A folder with a *.wandb.synced file is left out: `wandb sync` creates it after the upload.
    if any(not list(path.glob("*.wandb.synced")) for path in offline):
        upload = f"wandb sync {shlex.quote(str(wandb_dir))}/offline-run-*"
        commands.append(f"{upload}  # Weights & Biases wrote offline: this uploads the run")
    return commands
