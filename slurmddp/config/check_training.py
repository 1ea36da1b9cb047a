"""Check keys of the built-in trainer that depend on each other or on slurmddp's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.runs.status.metrics import KNOWN
from slurmddp.slurm.units import parse_duration_s
from slurmddp.spec import is_own_trainer


def check_training(config: Mapping[str, Any]) -> None:
    """Refuse names of metrics that slurmddp uses itself, and a `train.max_time` that is not a time."""
    if not is_own_trainer(config["program"]):
        return
    for name in config["metrics"] or ():
        if name in KNOWN or name.endswith("_per_s"):
            raise ConfigError(
                f"`metrics` has the name {name!r}, which slurmddp uses for a value of its own.",
                hint=f"Choose another name, such as own_{name}.",
            )
    if (limit := config["train"]["max_time"]) is not None:
        parse_duration_s(limit, "train.max_time")
