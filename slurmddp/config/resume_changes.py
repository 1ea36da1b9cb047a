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
from slurmddp.config.composition.overrides import TypedSetting, parse_setting
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
    """Return the job that resumes an existing run.

    Args:
        folder: the run folder.
        changes: settings `key=value` for keys of `free_keys()`, or for a greater `train.steps` or
            `train.max_time` of slurmddp's trainer.

    Raises:
        ConfigError: a change would alter the results of the run, or another account may write its files.
    """
    refuse_file_of_others(folder.config_file, READ_ONLY)
    stored = folder.config()
    before = deepcopy(stored)
    project_dir = Path(stored.pop("project_dir", folder.path.parent.parent))
    expressions = stored.pop(EXPRESSIONS, None)

    new = _changes(changes, folder)
    if any(key in SIZE for key, _ in new):
        resize(stored, dict(new))
    for key, value in new:
        _change(stored, key, value, project_dir)

    unquoted_values.refuse_respelled(stored, changes, ())
    checked = sbatch_environment.fill(check(stored), os.environ)
    refuse_malformed_address(checked, os.environ)
    refuse_shorter(folder, before, checked, [key for key, _ in new])
    if expressions is not None:
        checked[EXPRESSIONS] = expressions
    return build_job(checked, project_dir=project_dir, overrides=_typed(folder, changes), folder=folder)


def free_keys() -> list[str]:
    """Return the keys that may change when a run resumes; a section's name means all of its keys."""
    free = [name for name, key in every_key().items() if key.identity is FREE]
    sections = tuple(f"{name}." for name in free if TOP.get(name) and TOP[name].sections)
    return [*SIZE, *(name for name in free if name not in SIZE and not name.startswith(sections))]


def _changes(changes: Sequence[str], folder: RunFolder) -> list[tuple[str, Any]]:
    """Return (key, value) for each `key=value`; raise ConfigError for a key that a resume can't change."""
    settings = [parse_setting(text) for text in changes]
    program = folder.config().get("program") or {}
    free = [*free_keys(), *LENGTHS]
    if not is_own_trainer(program):
        free = [key for key in free if not key.startswith("train.")]
    for setting in settings:
        _refuse_change(setting, free, folder.name)

    arguments = [
        (setting.key, typed(setting.value or "")) for setting in settings if setting.key in EVERY_ARGUMENTS
    ]
    others = [setting for setting in settings if setting.key not in EVERY_ARGUMENTS]
    try:
        parsed = OverridesParser.create().parse_overrides([setting.text for setting in others])
        values = [override.value() for override in parsed]
    except HydraException as error:
        raise hydra_errors.explain(error, changes) from error
    return [*arguments, *zip((setting.key for setting in others), values, strict=True)]


def _refuse_change(setting: TypedSetting, free: Sequence[str], run: str) -> None:
    """Raise ConfigError unless a setting gives a value to a key that the run may change."""
    if setting.value is None and setting.sign != "~":
        if setting.top in TOP:
            raise ConfigError(f"{setting.text!r} has no value.", hint=f"Use {setting.key}=VALUE.")
        raise ConfigError(f"{setting.text!r} is not a setting.", hint="Settings are written KEY=VALUE.")

    if (setting.top not in free and setting.key not in free) or setting.sign == "~":
        raise ConfigError(
            f"{setting.text!r} would change the results of {run}; an existing run may only change "
            f"{', '.join(free)}.",
            hint=f"`slurmddp rerun {run} {shlex.quote(setting.text)}` starts a new run with this setting.",
        )


def _change(config: dict[str, Any], key: str, value: Any, project_dir: Path) -> None:
    """Set the value of a key in the configuration of a run; for `cluster`, a name means a cluster file."""
    if key == "cluster":
        if isinstance(value, str):
            value = _cluster_named(value, project_dir)
        config["cluster"] = value
        return

    *path, last = key.split(".")
    node: Any = config
    for part in path:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(
            f"`{key}` can't be set, because the run has no {path[0]}.", hint="Use +cluster=NAME first."
        )
    node[last] = value


def _cluster_named(name: str, project_dir: Path) -> dict[str, Any]:
    """Return the content of a cluster file of the project or of slurmddp, with `name` set."""
    cluster = compose_plan(make_plan([f"cluster={name}"], project_dir), [])["cluster"]
    return {**cluster, "name": cluster.get("name") or name}


def _typed(folder: RunFolder, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the settings with which a run was started, where changes replace the settings of their keys."""
    first: Sequence[str] = ()
    if folder.overrides_file.exists():
        first = folder.typed()
    # Only keys of the schema are replaced. For any other key, such as `cluster.env.NAME`, the first setting
    # stays: its plus adds the key, and the change follows it.
    changed = every_key().keys() & map(key_of, changes)
    return (*(setting for setting in first if key_of(setting) not in changed), *changes)
