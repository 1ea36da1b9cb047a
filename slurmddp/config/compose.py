"""Compose the command line, the project's files and slurmddp's own into one checked configuration.

Hydra searches groups (`model`, `data`, `loss`, `optimizer`, `scheduler`, `strategy`, `cluster`, and your own)
in the project folder's `conf/` first, then in slurmddp's. The project's `conf/slurmddp.yaml` holds the
project's defaults: keys with other values, and under `defaults:` the choices of groups. A project's
`conf/config.yaml` belongs to another program and is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurmddp.config import check_paths, hydra_errors, sbatch_environment, script_arguments
from slurmddp.config.check_values import check
from slurmddp.config.identity import relevant
from slurmddp.config.overrides import PROJECT_DEFAULTS, Plan, conf_roots, options, plan_from
from slurmddp.errors import ConfigError
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.config_secrets import EXPRESSIONS
from slurmddp.spec import MODULE

_PRIMARY = "slurmddp_primary"
_LEFT_OUT = [
    {"override hydra/job_logging": "none"},
    {"override hydra/hydra_logging": "none"},
    *({f"override hydra/{part}": None} for part in ("help", "hydra_help", "launcher", "sweeper", "output")),
]
"""Parts of Hydra that run programs; without them Hydra composes in two thirds of the time."""
_TROUBLE = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    RecursionError,
)


def compose(overrides: Sequence[str], project_dir: Path) -> dict[str, Any]:
    """Return the whole configuration, resolved and checked; raises ConfigError."""
    project_dir = project_dir.absolute()
    check_paths.check_project(project_dir)
    roots = conf_roots(project_dir)
    plan = make_plan(overrides, roots)
    composed = compose_plan(plan, roots, overrides)
    expressions = composed.pop(EXPRESSIONS)
    if isinstance(cluster := composed.get("cluster"), dict) and plan.cluster:
        cluster["name"] = cluster.get("name") or plan.cluster
    config = check(composed)
    if config["cluster"] is not None and not plan.has_cluster:
        raise ConfigError("A key of `cluster` is set, but no cluster is chosen.", hint="Say +cluster=NAME.")
    config = sbatch_environment.fill(config, os.environ)
    here = not (config["cluster"] and config["cluster"]["python"])
    check_paths.check_targets(config, project_dir, here=here)
    check_paths.check_loggers(config["loggers"], project_dir, here=here)
    check_paths.check_program(config, project_dir, here=here)
    config["name"] = config["name"] or _name(config)
    check_paths.check_name(config["name"])
    check_paths.check_data(relevant(config), project_dir)
    if config["program"].get("script"):
        for name in ("args", "resume_args"):
            config["program"][name] = script_arguments.composed(config["program"].get(name))
    return {**config, "project_dir": str(project_dir), **({EXPRESSIONS: expressions} if expressions else {})}


def unread(config: Mapping[str, Any], project_dir: Path) -> list[str]:
    """Return a note for each setting or file that has no effect."""
    return [*_unread_file(config, project_dir), *_unasked_memory(config)]


def _unasked_memory(config: Mapping[str, Any]) -> list[str]:
    memory, cluster = config["mem_gb"], config["cluster"] or {}
    if memory is None or cluster.get("mem_request") != "none":
        return []
    return [f"mem_gb={memory} has no effect: with mem_request: none, the job requests no memory."]


def _unread_file(config: Mapping[str, Any], project_dir: Path) -> list[str]:
    other, own = (project_dir / "conf" / name for name in ("config.yaml", PROJECT_DEFAULTS))
    has_conf = len(conf_roots(project_dir)) > 1  # the first is the project's
    if config["program"].get("script") or not has_conf or not other.is_file() or own.is_file():
        return []
    return [
        f"conf/config.yaml is not read: a project's defaults for slurmddp belong in conf/{PROJECT_DEFAULTS}."
    ]


def _name(config: Mapping[str, Any]) -> str:
    """Return the default of `name`: the name of the script, or of the model's class."""
    script = config["program"].get("script")
    if script is None:
        return str(config["model"]["_target_"].rpartition(".")[2].lower())
    last = script.rpartition(".")[2] if script.startswith(MODULE) else Path(script).stem
    return check_paths.as_name(last.removeprefix(MODULE)) or "script"


def make_plan(overrides: Sequence[str], roots: Sequence[Path]) -> Plan:
    """Return the plan for Hydra; raises ConfigError for a file that can't be right."""
    own = roots[0] / PROJECT_DEFAULTS
    has_own = len(roots) > 1 and own.is_file()
    plan = plan_from(overrides, roots, _load_yaml(own) if has_own else {})
    files = {"defaults": own} if has_own else {}
    if (cluster := options(roots, "cluster").get(plan.cluster or "")) is not None:
        files["cluster"] = cluster
    check_paths.check_clocks(files)
    return plan


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except _TROUBLE as error:
        raise ConfigError(f"{path} can't be read: {_flat(error)}.", hint="Correct the file.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no mapping.", hint="Write one `key: value` per line.")
    return {str(key): value for key, value in loaded.items()}


def compose_plan(plan: Plan, roots: Sequence[Path], typed: Sequence[str]) -> dict[str, Any]:
    """Let Hydra compose a plan, and resolve the result without checking it; raises ConfigError."""
    try:
        return _compose(plan, roots)
    except _TROUBLE as error:
        raise hydra_errors.explain(error, typed, roots) from error


def _compose(plan: Plan, roots: Sequence[Path]) -> dict[str, Any]:
    primary = {**plan.primary, "defaults": [*plan.primary["defaults"], *_LEFT_OUT]}
    if len(roots) > 1:
        primary["hydra"] = {"searchpath": ["pkg://slurmddp.conf"]}
    ConfigStore.instance().store(_PRIMARY, primary)
    with initialize_config_dir(str(roots[0]), job_name="slurmddp", version_base="1.3"):
        composed = hydra_compose(_PRIMARY, list(plan.overrides))
    container: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    raw: Any = OmegaConf.to_container(composed, resolve=False)
    return {
        **{str(key): value for key, value in container.items()},
        EXPRESSIONS: config_secrets.expressions(raw, container),
    }


def _flat(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:400]
