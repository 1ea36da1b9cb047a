"""Check keys of the built-in trainer that depend on each other or on slurmddp's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.settings.spec import is_own_trainer, parse_best
from slurmddp.slurm.units import parse_duration_s


def check_training(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for wrong keys of slurmddp's trainer that the schema can't check.

    These are names of metrics that slurmddp uses itself, a malformed `train.max_time`, and an unknown metric
    in `train.best`.
    """
    if not is_own_trainer(config["program"]):
        return

    for name in config["metrics"] or ():
        # Imported in the loop, because few projects have metrics, and the import takes 5 ms.
        from slurmddp.runs.status.metrics import KNOWN

        if name in KNOWN or name.endswith("_per_s"):
            raise ConfigError(
                f"`metrics` has the name {name!r}, which slurmddp itself uses.",
                hint=f"Choose another name, such as my_{name}.",
            )

    limit = config["train"]["max_time"]
    if limit is not None:
        parse_duration_s(limit, "train.max_time")

    best = config["train"]["best"]
    if best is not None:
        name, _ = parse_best(best)
        known = ["eval_loss", *(config["metrics"] or ())]
        if name not in known:
            raise ConfigError(
                f"`train.best` names {name!r}, which is not a metric.", hint=near_matches(name, known)
            )
