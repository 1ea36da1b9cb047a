"""Give a run one identity at experiment trackers, so that each attempt continues the same experiment.

Without this identity a tracker starts a new experiment at every restart. MLflow's server makes the ids of its
experiments, so MLflow gets none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from slurmddp.runs.folder.layout import RunFolder

_WANDB_CHARS = 64
"""The longest run id that Weights & Biases accepts, in characters."""


def tracker_environment(folder: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that give the run the same id at trackers in every attempt.

    A variable that `environ` contains is left out, so that the rank keeps its value.
    """
    digest = hashlib.sha256(f"{folder.name}\0{_birth(folder)}".encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9_-]", "-", folder.name)[: _WANDB_CHARS - 7]
    values = {
        "WANDB_RUN_ID": f"{name}-{digest[:6]}",
        "WANDB_RESUME": "allow",
        # An id of Comet has 32 to 50 letters and digits.
        "COMET_EXPERIMENT_KEY": digest[:32],
    }
    # An id of Neptune has up to 36 characters; in its offline mode Neptune takes no id.
    if environ.get("NEPTUNE_MODE") != "offline":
        values["NEPTUNE_CUSTOM_RUN_ID"] = digest[:32]

    return {variable: value for variable, value in values.items() if variable not in environ}


def _birth(folder: RunFolder) -> str:
    """Return the first line of the run's event file, which identifies the run; empty if it can't be read.

    The line differs between two people's runs of the same name, and between a run and its repetition by
    `--again`.
    """
    try:
        with folder.attempts_file.open(encoding="utf-8", errors="replace") as events:
            return events.readline()
    except OSError:
        return ""
