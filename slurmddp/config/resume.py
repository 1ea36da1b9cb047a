"""Builds the job of an existing run, with changes of its size, where it runs and how long."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from slurmddp.config import hydra_errors, sbatch_environment, schema, sizes
from slurmddp.config.compose import compose_plan, load_yaml, make_plan
from slurmddp.config.job import to_job
from slurmddp.config.overrides import conf_roots, take_apart
from slurmddp.errors import ConfigError
from slurmddp.runs.folder.hidden import EXPRESSIONS
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import NOT_COMPUTED, Job

WHERE_AND_HOW_LONG = (
    "partition",
    "account",
    "qos",
    "time_limit",
    "mem_gb",
    "cpus_per_node",
    "launcher",
    "submitter",
    "spare_nodes",
    "elastic",
    "preflight",
    *NOT_COMPUTED,
)
"""What may change when a run goes on, and so is left out of its name; `cluster` and `policy` too."""


def job_of_run(folder: RunFolder, changes: Sequence[str] = ()) -> Job:
    """Return the job of an existing run; `changes` may touch its size, where it runs and how long, only."""
    stored = _with_new_keys(folder.config())
    project_dir = Path(stored.pop("project_dir", folder.path.parent.parent))
    expressions = {EXPRESSIONS: stored.pop(EXPRESSIONS)} if EXPRESSIONS in stored else {}
    new = _changes(changes, folder)
    if any(key in sizes.SIZE for key, _ in new):
        sizes.resize(stored, dict(new))
    for key, value in new:
        _change(stored, key, value, project_dir)
    checked = sbatch_environment.fill(schema.check(stored), os.environ)
    config = {**checked, **expressions}
    return to_job(config, project_dir, _typed(folder, changes), 0, folder)


def _with_new_keys(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a run's configuration with the defaults of the keys that are newer than the run."""
    base = load_yaml(conf_roots(Path.cwd())[-1] / "config.yaml")
    whole = {**{key: base[key] for key in base if key in schema.TOP}, **stored}
    for key in ("train", "policy"):
        if isinstance(stored.get(key), dict):
            whole[key] = {**base[key], **stored[key]}
    return whole


def _changes(changes: Sequence[str], folder: RunFolder) -> list[tuple[str, Any]]:
    given = [take_apart(text) for text in changes]
    for one in given:
        free = (*sizes.SIZE, *WHERE_AND_HOW_LONG, "cluster", "policy")
        if (one.first not in free and one.key not in free) or one.sign == "~":
            raise ConfigError(
                f"{one.text!r} changes what {folder.name} computes; a run that goes on may only change "
                f"{', '.join((*sizes.SIZE, *WHERE_AND_HOW_LONG))}, cluster and policy.",
                hint="Start a new run for it with `slurmddp train`.",
            )
        if one.value is None:
            raise ConfigError(f"{one.text!r} has no value.", hint=f"Say {one.key}=VALUE.")
    try:
        parsed = OverridesParser.create().parse_overrides([one.text for one in given])
        return [(one.key, new.value()) for one, new in zip(given, parsed, strict=True)]
    except HydraException as error:
        raise hydra_errors.explain(error, changes) from error


def _change(config: dict[str, Any], key: str, value: Any, project_dir: Path) -> None:
    if key == "cluster":
        config["cluster"] = _cluster_named(value, project_dir) if isinstance(value, str) else value
        return
    *way, last = key.split(".")
    node: Any = config
    for part in way:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"`{key}` can't be set: the run has no {way[0]}.", hint="Say +cluster=NAME first.")
    node[last] = value


def _cluster_named(name: str, project_dir: Path) -> dict[str, Any]:
    roots = conf_roots(project_dir)
    plan = make_plan([f"+cluster={name}"], roots, project_dir)
    cluster = compose_plan(plan, roots, [])["cluster"]
    return {**cluster, "name": cluster.get("name") or name}


def _typed(folder: RunFolder, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a run: as it was first typed, and the changes since."""
    file = folder.overrides_file
    first = shlex.split(file.read_text(encoding="utf-8")) if file.exists() else []
    return (*first, *changes)
