"""Ranks checkpoints by a metric that was given to the save."""

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
    """Return step and metric of the best checkpoint under `root`, or None; its files are not verified."""
    for folder in ranked(root, best):
        with suppress(CheckpointError, OSError):  # Retention may have deleted it.
            return step_of(folder) or 0, load_manifest(folder).meta["metrics"][best[0]]
    return None


def check_best(best: Any) -> None:
    """Raise ConfigError unless `best` is a name and a mode."""
    is_pair = isinstance(best, (tuple, list)) and len(best) == 2 and isinstance(best[0], str)
    if not is_pair or best[1] not in BEST_MODES:
        raise ConfigError(
            f"The best checkpoint can't be chosen by {best!r}.",
            hint='Give the name of a metric, and whether its least or greatest value is best: ("eval_loss", '
            '"min").',
        )


def check_choice(step: Any, best: Any) -> None:
    """Raise ConfigError if both a step and a metric choose a checkpoint, or one is not as it should be."""
    if step is not None and not isinstance(step, int):
        raise ConfigError(f"load() was given step={step!r}.", hint="Give a number of steps.")
    if best is not None:
        check_best(best)
        if step is not None:
            raise ConfigError("load() was given a step and a metric.", hint="Give `step` or `best`.")


def ranked(root: Path, best: Best) -> list[Path]:
    """Return the checkpoints that have the metric, the best first; of equal values the newest first."""
    name, mode = best
    sign = 1 if mode == "min" else -1
    found = []
    for folder in checkpoint_folders(root):
        with suppress(CheckpointError, OSError):  # A damaged manifest has no metrics.
            metrics = load_manifest(folder).meta.get("metrics", {})
            if name in metrics:
                found.append((sign * metrics[name], folder))
    return [folder for _, folder in sorted(found, key=lambda one: one[0])]
