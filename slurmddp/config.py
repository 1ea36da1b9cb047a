"""From the command line and YAML files to a `Job`; no other module knows Hydra.

Groups (`model`, `data`, `loss`, `optimizer`, `scheduler`, `strategy`, `cluster`, and your own) are looked up
in the project folder's `conf/` first, then in slurmddp's. A project's own defaults stand in its
`conf/slurmddp.yaml`: the keys of slurmddp's `conf/config.yaml` that it wants different, and under `defaults:`
the choices of groups. A project's `conf/config.yaml`, if it has one, is another program's and not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurmddp import (
    config_arguments,
    config_check,
    config_environment,
    config_errors,
    config_overrides,
    config_schema,
    config_sizes,
)
from slurmddp.config_overrides import PROJECT_DEFAULTS, Plan
from slurmddp.errors import ConfigError
from slurmddp.runs import hidden
from slurmddp.runs.folder import RunFolder
from slurmddp.runs.hidden import EXPRESSIONS
from slurmddp.spec import NOT_COMPUTED, Cluster, Job, Policy, Program, computed, relevant

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

_PRIMARY = "slurmddp_primary"
_LEFT_OUT = [
    {"override hydra/job_logging": "none"},
    {"override hydra/hydra_logging": "none"},
    *({f"override hydra/{part}": None} for part in ("help", "hydra_help", "launcher", "sweeper", "output")),
]
"""Parts of Hydra that run programs; without them a configuration is composed in two thirds of the time."""
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
    config_check.check_project(project_dir)
    roots = config_overrides.conf_roots(project_dir)
    plan = _plan(overrides, roots, project_dir)
    composed = _composed(plan, roots, overrides)
    expressions = composed.pop(EXPRESSIONS)
    config = config_schema.check(composed)
    if config["cluster"] is not None and not plan.has_cluster:
        raise ConfigError("A key of `cluster` is set, but no cluster is chosen.", hint="Say +cluster=NAME.")
    if config["cluster"] is not None:
        config["cluster"]["name"] = config["cluster"]["name"] or plan.cluster or "unnamed"
    config = config_environment.fill(config, os.environ)
    elsewhere = bool(config["cluster"] and config["cluster"]["python"])
    config_check.check_targets(config, project_dir, here=not elsewhere)
    config_check.check_script(config, project_dir)
    config["name"] = config["name"] or _name(config)
    config_check.check_name(config["name"])
    config_check.check_data(relevant(config), project_dir)
    config_check.check_loss(config)
    if config["program"].get("script"):
        config["program"]["args"] = config_arguments.composed(config["program"].get("args"))
    return {**config, "project_dir": str(project_dir), **({EXPRESSIONS: expressions} if expressions else {})}


def unread(config: Mapping[str, Any], project_dir: Path) -> list[str]:
    """Return a note for each setting or file that a person gives and that has no effect."""
    return [*_unread_file(config, project_dir), *_unasked_memory(config)]


def _unasked_memory(config: Mapping[str, Any]) -> list[str]:
    memory, cluster = config["mem_gb"], config["cluster"] or {}
    if memory is None or cluster.get("mem_request") != "none":
        return []
    return [f"mem_gb={memory} has no effect: with mem_request: none, the job requests no memory."]


def _unread_file(config: Mapping[str, Any], project_dir: Path) -> list[str]:
    other, own = (project_dir / "conf" / name for name in ("config.yaml", PROJECT_DEFAULTS))
    has_conf = len(config_overrides.conf_roots(project_dir)) > 1  # the first is the project's
    if config["program"].get("script") or not has_conf or not other.is_file() or own.is_file():
        return []
    return [
        f"conf/config.yaml is not read; a project's defaults for slurmddp stand in conf/{PROJECT_DEFAULTS}."
    ]


def _name(config: Mapping[str, Any]) -> str:
    """Return the first part of a run's name: the script's, or the model's class."""
    script = config["program"].get("script")
    if script is None:
        return str(config["model"]["_target_"].rpartition(".")[2].lower())
    return config_check.as_name(Path(script).stem) or "script"


def build_job(
    config: Mapping[str, Any], *, project_dir: Path, overrides: Sequence[str] = (), gpus_here: int = 0
) -> Job:
    """Return the job that a composed configuration describes, with every size a plain number."""
    return _job(config, project_dir.absolute(), overrides, gpus_here, None)


def job_of_run(folder: RunFolder, changes: Sequence[str] = ()) -> Job:
    """Return the job of an existing run; `changes` may touch its size, where it runs and how long, only."""
    stored = _with_new_keys(folder.config())
    project_dir = Path(stored.pop("project_dir", folder.path.parent.parent))
    expressions = {EXPRESSIONS: stored.pop(EXPRESSIONS)} if EXPRESSIONS in stored else {}
    new = _changes(changes, folder)
    if any(key in config_sizes.SIZE for key, _ in new):
        config_sizes.resize(stored, dict(new))
    for key, value in new:
        _change(stored, key, value, project_dir)
    checked = config_environment.fill(config_schema.check(stored), os.environ)
    config = {**checked, **expressions}
    return _job(config, project_dir, _typed(folder, changes), 0, folder)


def _job(
    config: Mapping[str, Any],
    project_dir: Path,
    overrides: Sequence[str],
    gpus_here: int,
    folder: RunFolder | None,
) -> Job:
    cluster = _cluster(config)
    launcher = _launcher(config, cluster)
    resources = config_sizes.resolve(config, cluster, launcher, gpus_here)
    config_sizes.check_global_batch(config, resources)
    final = {
        **config,
        "nodes": resources.nodes,
        "gpus_per_node": resources.gpus_per_node,
        "ranks_per_node": resources.ranks_per_node,
        "launcher": launcher,
        "project_dir": str(project_dir),
    }
    run_name = folder.name if folder else f"{config['name']}-{fingerprint(final)}"
    if config["elastic"]:
        final = config_sizes.hold_global_batch(final, resources)
    run_dir = folder.path if folder else Path(os.path.normpath(project_dir / config["runs_dir"] / run_name))
    config_check.check_folder(run_dir)
    return Job(
        name=config["name"],
        run_name=run_name,
        run_dir=run_dir,
        project_dir=project_dir,
        launcher=launcher,
        submitter=config["submitter"],
        python=(cluster.python if cluster and launcher == "slurm" else None) or sys.executable,
        cluster=cluster or Cluster(name="local"),
        resources=resources,
        policy=Policy(**config["policy"]),
        program=Program(target=config["program"]["_target_"], config=final),
        overrides=tuple(overrides),
        snapshot=config["snapshot"],
        elastic=config["elastic"],
    )


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return eight hex digits that change with what is computed, and not with where or how long it runs."""
    named = {**computed(config), "nodes": config["nodes"], "ranks_per_node": config["ranks_per_node"]}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _plan(overrides: Sequence[str], roots: Sequence[Path], project_dir: Path) -> Plan:
    base = _load(roots[-1] / "config.yaml")
    own = roots[0] / PROJECT_DEFAULTS
    has_own = len(roots) > 1 and own.is_file()
    plan = config_overrides.plan(overrides, roots, base, _load(own) if has_own else {})
    files = {"defaults": own} if has_own else {}
    if plan.cluster is not None:
        files["cluster"] = config_overrides.options(roots, "cluster")[plan.cluster]
    config_check.check_clocks(files)
    return plan


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (*_TROUBLE, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {_flat(error)}.", hint="Correct the file.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no mapping.", hint="Write one `key: value` per line.")
    return {str(key): value for key, value in loaded.items()}


def _composed(plan: Plan, roots: Sequence[Path], typed: Sequence[str]) -> dict[str, Any]:
    try:
        return _compose(plan, roots)
    except _TROUBLE as error:
        key = config_errors.unknown_in_node(error)
        if key is not None:
            raise config_errors.no_such_key(key, _keys_beside(key, plan, roots)) from error
        raise config_errors.explain(error, typed) from error


def _compose(plan: Plan, roots: Sequence[Path], *, resolve: bool = True) -> dict[str, Any]:
    primary = {**plan.primary, "defaults": [*plan.primary["defaults"], *_LEFT_OUT]}
    if len(roots) > 1:
        primary["hydra"] = {"searchpath": ["pkg://slurmddp.conf"]}
    ConfigStore.instance().store(_PRIMARY, primary)
    with initialize_config_dir(str(roots[0]), job_name="slurmddp", version_base="1.3"):
        composed = hydra_compose(_PRIMARY, list(plan.overrides))
    container: Any = OmegaConf.to_container(composed, resolve=resolve, throw_on_missing=resolve)
    config = {str(key): value for key, value in container.items()}
    if resolve:
        raw: Any = OmegaConf.to_container(composed, resolve=False)
        config[EXPRESSIONS] = hidden.expressions(raw, container)
    return config


def _keys_beside(key: str, plan: Plan, roots: Sequence[Path]) -> list[str]:
    """Return the keys that the node of an unknown key does have."""
    rest = tuple(text for text in plan.overrides if text.partition("=")[0] != key)
    try:
        node: Any = _compose(Plan(plan.primary, rest), roots, resolve=False)
    except _TROUBLE:
        return []
    for part in key.split(".")[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    return [str(one) for one in node] if isinstance(node, dict) else []


def _flat(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:400]


def _cluster(config: Mapping[str, Any]) -> Cluster | None:
    """Return the chosen cluster with the partition, account and qos that the run asks for."""
    if config["cluster"] is None:
        return None
    fields = {**config["cluster"], "setup": tuple(config["cluster"]["setup"])}
    for key in ("partition", "account", "qos"):
        fields[key] = config[key] if config[key] is not None else fields[key]
    return Cluster(**fields)


def _with_new_keys(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a run's configuration with the defaults of the keys that are newer than the run."""
    base = _load(config_overrides.conf_roots(Path.cwd())[-1] / "config.yaml")
    whole = {**{key: base[key] for key in base if key in config_schema.TOP}, **stored}
    for key in ("train", "policy"):
        if isinstance(stored.get(key), dict):
            whole[key] = {**base[key], **stored[key]}
    return whole


def _launcher(config: Mapping[str, Any], cluster: Cluster | None) -> str:
    launcher = str(config["launcher"])
    if launcher == "slurm" and cluster is None:
        raise ConfigError("launcher=slurm needs a cluster, and none is chosen.", hint="Say +cluster=NAME.")
    return launcher if launcher != "auto" else ("local" if cluster is None else "slurm")


def _changes(changes: Sequence[str], folder: RunFolder) -> list[tuple[str, Any]]:
    given = [config_overrides.take_apart(text) for text in changes]
    for one in given:
        free = (*config_sizes.SIZE, *WHERE_AND_HOW_LONG, "cluster", "policy")
        if (one.first not in free and one.key not in free) or one.sign == "~":
            raise ConfigError(
                f"{one.text!r} changes what {folder.name} computes; a run that goes on may only change "
                f"{', '.join((*config_sizes.SIZE, *WHERE_AND_HOW_LONG))}, cluster and policy.",
                hint="Start a new run for it with `slurmddp train`.",
            )
        if one.value is None:
            raise ConfigError(f"{one.text!r} has no value.", hint=f"Say {one.key}=VALUE.")
    try:
        parsed = OverridesParser.create().parse_overrides([one.text for one in given])
        return [(one.key, new.value()) for one, new in zip(given, parsed, strict=True)]
    except HydraException as error:
        raise config_errors.explain(error, changes) from error


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
    roots = config_overrides.conf_roots(project_dir)
    plan = _plan([f"+cluster={name}"], roots, project_dir)
    cluster = _composed(plan, roots, [])["cluster"]
    return {**cluster, "name": cluster.get("name") or name}


def _typed(folder: RunFolder, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a run: as it was first typed, and the changes since."""
    file = folder.overrides_file
    first = shlex.split(file.read_text(encoding="utf-8")) if file.exists() else []
    return (*first, *changes)
