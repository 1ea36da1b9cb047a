"""Rank checkpoints by a metric that was given to the save."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files.manifest import checkpoint_folders, load_manifest, step_of
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.settings.spec import BEST_MODES

Best = Sequence[str]
"""The name of a metric, and "min" or "max": whether the least or the greatest value is the best."""


def step_and_value(root: Path, best: Best) -> tuple[int, float] | None:
    """Return the step and the value of the metric of the best checkpoint under `root`.

    Only the manifest is read; the files of the checkpoint are not verified. None if no checkpoint has the
    metric.
    """
    for folder in ranked(root, best):
        # Another process may have deleted the checkpoint since it was ranked.
        with suppress(CheckpointError, OSError):
            return step_of(folder) or 0, load_manifest(folder).meta["metrics"][best[0]]

    return None


def check_best(best: Any) -> None:
    """Raise ConfigError unless `best` is a pair: the name of a metric, and "min" or "max"."""
    is_pair = isinstance(best, (tuple, list)) and len(best) == 2 and isinstance(best[0], str)
    if not is_pair or best[1] not in BEST_MODES:
        raise ConfigError(
            f"The best checkpoint can't be chosen by {best!r}.",
            hint='Give the name of a metric, and whether its least or greatest value is best: ("eval_loss", '
            '"min").',
        )


def check_choice(step: Any, best: Any) -> None:
    """Raise ConfigError if load() can't choose a checkpoint by `step` or `best`, or if both are given."""
    if step is not None and not isinstance(step, int):
        raise ConfigError(
            f"load() was given step={step!r}.", hint="Give a number of training steps, for example step=1000."
        )
    if best is None:
        return

    check_best(best)
    if step is not None:
        raise ConfigError("load() was given a step and a metric.", hint="Give either `step` or `best`.")


def ranked(root: Path, best: Best) -> list[Path]:
    """Return the checkpoints with the metric, best first; checkpoints with equal values newest first."""
    name, mode = best
    sign = 1 if mode == "min" else -1
    measured = []
    for folder in checkpoint_folders(root):
        # Skip a checkpoint that has a damaged manifest, or that another process has just deleted.
        with suppress(CheckpointError, OSError):
            metrics = load_manifest(folder).meta.get("metrics", {})
            if name in metrics:
                measured.append((sign * metrics[name], folder))

    # `checkpoint_folders` lists the newest first. The sort is stable, so equal values keep that order.
    measured.sort(key=lambda pair: pair[0])
    return [folder for _, folder in measured]
