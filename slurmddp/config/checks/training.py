"""Check keys of the built-in trainer that depend on each other or on slurmddp's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.errors import ConfigError, near_matches
from slurmddp.settings.spec import is_own_trainer, parse_best
from slurmddp.slurm.units import parse_duration_s


def check_training(config: Mapping[str, Any]) -> None:
    """Refuse names that slurmddp uses itself, a time that is not one, and a best metric that is not there."""
    if not is_own_trainer(config["program"]):
        return
    for name in config["metrics"] or ():
        from slurmddp.runs.status.metrics import KNOWN  # Rarely used, and its module takes 5 ms.

        if name in KNOWN or name.endswith("_per_s"):
            raise ConfigError(
                f"`metrics` has the name {name!r}, which slurmddp uses for a value of its own.",
                hint=f"Choose another name, such as own_{name}.",
            )
    if (limit := config["train"]["max_time"]) is not None:
        parse_duration_s(limit, "train.max_time")
    if (best := config["train"]["best"]) is not None:
        name, known = parse_best(best)[0], ["eval_loss", *(config["metrics"] or ())]
        if name not in known:
            raise ConfigError(
                f"`train.best` names {name!r}, which is not a metric.", hint=near_matches(name, known)
            )
