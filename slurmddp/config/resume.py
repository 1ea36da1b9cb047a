"""Build the job of an existing run, with changes of size, place, time limit and length."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from slurmddp.config.checks import sbatch_environment, unquoted_values
from slurmddp.config.checks.master_address import refuse_malformed_address
from slurmddp.config.composition import hydra_errors
from slurmddp.config.composition.compose import compose_plan, make_plan
from slurmddp.config.composition.overrides import take_apart
from slurmddp.config.extension import LENGTHS, refuse_shorter
from slurmddp.config.job import build_job
from slurmddp.config.resources import SIZE, resize
from slurmddp.errors import ConfigError
from slurmddp.runs.folder.config_secrets import EXPRESSIONS
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_file_of_others
from slurmddp.settings.arguments import EVERY_ARGUMENTS, key_of, typed
from slurmddp.settings.check_values import check
from slurmddp.settings.keys import TOP, every_key
from slurmddp.settings.schema import FREE
from slurmddp.settings.spec import Job, is_own_trainer


def job_of_run(folder: RunFolder, changes: Sequence[str] = ()) -> Job:
    """Return the job of an existing run.

    Args:
        folder: the run folder.
        changes: arguments `key=value`, for keys of `free_keys()`, and for a longer `train.steps` or
            `train.max_time` of slurmddp's trainer.

    Raises:
        ConfigError: a change concerns the computation, or another account decides what the run computes.
    """
    refuse_file_of_others(folder.config_file, READ_ONLY)
    stored = folder.config()
    before = deepcopy(stored)
    project_dir = Path(stored.pop("project_dir", folder.path.parent.parent))
    expressions = {EXPRESSIONS: stored.pop(EXPRESSIONS)} if EXPRESSIONS in stored else {}
    new = _changes(changes, folder)
    if any(key in SIZE for key, _ in new):
        resize(stored, dict(new))
    for key, value in new:
        _change(stored, key, value, project_dir)
    unquoted_values.refuse_respelled(stored, changes, ())
    checked = sbatch_environment.fill(check(stored), os.environ)
    refuse_malformed_address(checked, os.environ)
    refuse_shorter(folder, before, checked, [key for key, _ in new])
    config = {**checked, **expressions}
    return build_job(config, project_dir=project_dir, overrides=_typed(folder, changes), folder=folder)


def free_keys() -> list[str]:
    """Return the keys that an existing run may change; a section stands for all its keys."""
    free = [name for name, one in every_key().items() if one.identity is FREE]
    whole = [f"{name}." for name in free if TOP.get(name) and TOP[name].sections]
    return [
        *SIZE,
        *(name for name in free if name not in SIZE and not name.startswith(tuple(whole))),
    ]


def _changes(changes: Sequence[str], folder: RunFolder) -> list[tuple[str, Any]]:
    given = [take_apart(text) for text in changes]
    program = folder.config().get("program") or {}
    free = [*free_keys(), *LENGTHS]
    if not is_own_trainer(program):
        free = [key for key in free if not key.startswith("train.")]
    for one in given:
        if one.value is None and one.sign != "~":
            if one.first in TOP:
                raise ConfigError(f"{one.text!r} has no value.", hint=f"Say {one.key}=VALUE.")
            raise ConfigError(f"{one.text!r} is not a setting.", hint="Settings are written KEY=VALUE.")
        if (one.first not in free and one.key not in free) or one.sign == "~":
            raise ConfigError(
                f"{one.text!r} changes what {folder.name} computes; an existing run may only change "
                f"{', '.join(free)}.",
                hint=f"`slurmddp rerun {folder.name} {shlex.quote(one.text)}` starts a new run with it.",
            )
    arguments = [(one.key, typed(one.value or "")) for one in given if one.key in EVERY_ARGUMENTS]
    others = [one for one in given if one.key not in EVERY_ARGUMENTS]
    try:
        parsed = OverridesParser.create().parse_overrides([one.text for one in others])
        return arguments + [(one.key, new.value()) for one, new in zip(others, parsed, strict=True)]
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
    cluster = compose_plan(make_plan([f"cluster={name}"], project_dir), [])["cluster"]
    return {**cluster, "name": cluster.get("name") or name}


def _typed(folder: RunFolder, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a run: the first one, in which changes take the place of their keys."""
    first = folder.typed() if folder.overrides_file.exists() else []
    # A key that slurmddp does not know needs its first word, which has a plus.
    changed = every_key().keys() & map(key_of, changes)
    return (*(one for one in first if key_of(one) not in changed), *changes)
