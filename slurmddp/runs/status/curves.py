"""The commands that show the curves which loggers have written into a run folder."""

from __future__ import annotations

import shlex

from slurmddp.runs.folder.layout import RunFolder


def curve_commands(folder: RunFolder) -> list[str]:
    """Return shell commands that show or upload the curves that the loggers of a run have written."""
    commands = []
    if folder.tensorboard_dir.is_dir():
        commands.append(f"tensorboard --logdir {shlex.quote(str(folder.tensorboard_dir))}")

    wandb_dir = folder.loggers_dir / "wandb"
    offline = list(wandb_dir.glob("offline-run-*"))
    # `wandb sync` leaves such a file beside what it has uploaded.
    if any(not list(path.glob("*.wandb.synced")) for path in offline):
        upload = f"wandb sync {shlex.quote(str(wandb_dir))}/offline-run-*"
        commands.append(f"{upload}  # Weights & Biases wrote offline: this uploads the run")
    return commands
