"""Compose the command line, the project's files and slurmddp's own into one checked configuration.

Hydra searches groups (`model`, `data`, `loss`, `optimizer`, `scheduler`, `strategy`, `cluster`, and your own)
in the project folder's `conf/` first, then in slurmddp's. The project's `conf/slurmddp.yaml` holds the
project's defaults: keys with other values, and under `defaults:` the choices of groups. A project's
`conf/config.yaml` may belong to another program; it is read with `--config-name config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from slurmddp.config.checks import paths, sbatch_environment, unquoted_values
from slurmddp.config.checks.master_address import refuse_malformed_address
from slurmddp.config.checks.signatures import signature_of
from slurmddp.config.composition import hydra_errors, hydra_keys
from slurmddp.config.composition.overrides import DEFAULTS_NODE, CompositionPlan, plan_from
from slurmddp.config.composition.sources import DEFAULT, Sources, conf_roots, defaults_file, run_code
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import ConfigError
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.config_secrets import EXPRESSIONS
from slurmddp.runs.folder.owner import refuse_files_of_others
from slurmddp.settings.arguments import EVERY_ARGUMENTS, REFERENCE, key_of
from slurmddp.settings.arguments import composed as script_words
from slurmddp.settings.check_values import check
from slurmddp.settings.identity import relevant
from slurmddp.settings.keys import GROUPS, TOP
from slurmddp.settings.schema import COMPUTED
from slurmddp.settings.spec import MODULE, own_script

_PRIMARY = "slurmddp_primary"
_STARTS_NOTHING = ("--dry-run", "--check")
"""Flags of `slurmddp run` after which nobody expects a job."""
_LEFT_OUT = [
    {"override hydra/job_logging": "none"},
    {"override hydra/hydra_logging": "none"},
    *({f"override hydra/{part}": None} for part in ("help", "hydra_help", "launcher", "sweeper", "output")),
]
"""Parts of Hydra that run programs; without them Hydra composes in two thirds of the time."""
Shared = dict[str, DictConfig]
"""What Hydra has composed without values, for each choice of files."""
_left: dict[str, DictConfig] = {}
"""What `login_node` composed last, by its plan, for the `compose` that follows: Hydra takes 0.1 s."""
TROUBLE = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    RecursionError,
)


def compose(
    overrides: Sequence[str], project_dir: Path, sources: Sources = DEFAULT, *, shared: Shared | None = None
) -> dict[str, Any]:
    """Return the whole configuration, resolved and checked; raises ConfigError.

    Args:
        overrides: the settings of the command line.
        project_dir: the project's folder.
        sources: the flags that name other places of files.
        shared: what Hydra has composed for command lines that chose the same files, such as other points of
            a sweep; the files are read once for all of them.
    """
    project_dir = project_dir.absolute()
    paths.check_project(project_dir)
    for text in overrides:
        paths.check_utf8("The setting", text)
    plan = make_plan(overrides, project_dir, sources)
    composed = compose_plan(plan, overrides, shared)
    expressions = composed.pop(EXPRESSIONS)
    if isinstance(cluster := composed.get("cluster"), dict) and plan.cluster:
        cluster["name"] = cluster.get("name") or plan.cluster
    unquoted_values.refuse_respelled(composed, overrides, _files(plan, defaults_file(project_dir, sources)))
    config = check(composed)
    if config["cluster"] is not None and not plan.has_cluster:
        raise ConfigError("A key of `cluster` is set, but no cluster is chosen.", hint="Say +cluster=NAME.")
    if config["ssh"] and not plan.has_cluster:
        raise ConfigError(
            f"ssh={config['ssh']} is set, but no cluster is chosen.", hint="Say +cluster=NAME as well."
        )
    config = sbatch_environment.fill(config, os.environ)
    refuse_malformed_address(config, os.environ)
    here = not (config["cluster"] and config["cluster"]["python"])
    paths.check_targets(config, project_dir, here=here)
    paths.check_python(config)
    paths.check_loggers(config["loggers"], project_dir, here=here)
    paths.check_program(config, project_dir, here=here)
    config["name"] = config["name"] or _name(config)
    paths.check_name(config["name"])
    paths.check_data(relevant(config), project_dir)
    if config["program"].get("script"):
        for key in EVERY_ARGUMENTS:
            name = key.removeprefix("program.")
            config["program"][name] = script_words(config["program"].get(name))
    return {**config, "project_dir": str(project_dir), **({EXPRESSIONS: expressions} if expressions else {})}


def login_node(
    overrides: Sequence[str], project_dir: Path, sources: Sources = DEFAULT
) -> dict[str, str | None] | None:
    """Return the keys `ssh`, `ssh_folder` and `python` of a command; None if it stays on this machine.

    A command that came over ssh stays.

    Other keys are not resolved or checked, because they describe the cluster. A configuration that can't be
    composed also gives None; `compose` raises its error.

    Raises:
        ConfigError: the value of a key can't be right.
    """
    if os.environ.get(OVER_SSH_VARIABLE):
        return None
    try:
        plan = make_plan(overrides, project_dir.absolute(), sources)
        if not plan.has_cluster:
            return None
        composed = with_hydra(plan)
        _left.clear()
        names = ("ssh", "launcher", "cluster.ssh", "cluster.ssh_folder", "cluster.python")
        own, launcher, *cluster = (OmegaConf.select(composed, name) for name in names)
    except (ConfigError, *TROUBLE):
        return None
    host, folder, python = own or cluster[0], *cluster[1:]
    if not host or launcher == "local":
        _left[repr(plan)] = composed
        return None
    # HOST:NAME names a run, and copies of reports lie in a folder with the name of the host.
    if not isinstance(host, str) or not re.fullmatch(r"(?!-)[\w.@%+-]+", host):
        raise ConfigError(
            f"ssh={host!r} is not a host.", hint="Give a host of your ~/.ssh/config: ssh=login1."
        )
    for name, value in (("cluster.ssh_folder", folder), ("cluster.python", python)):
        if not isinstance(value, str | None):
            raise ConfigError(f"{name}={value!r} is not a path.", hint="Give a path on the login node.")
    return {"ssh": host, "ssh_folder": folder, "python": python}


def unread(config: Mapping[str, Any], project_dir: Path, sources: Sources = DEFAULT) -> list[str]:
    """Return a note for each setting or file that has no effect."""
    return [
        *_unread_file(config, project_dir, sources),
        *_unasked_memory(config),
        *_literal_variables(config),
        *_after_script(config),
    ]


def _literal_variables(config: Mapping[str, Any]) -> list[str]:
    """Return a note about each variable of the ranks whose value looks like another variable."""
    env = (config["cluster"] or {}).get("env", {})
    return [
        f"cluster.env.{name} is the text {value}, because no shell reads it. `export {name}={value}` under "
        "`setup:` takes the variable of the node, and ${oc.env:NAME} the variable of this machine."
        for name, value in env.items()
        if re.search(r"\$[A-Za-z_{]", value)
    ]


def _after_script(config: Mapping[str, Any]) -> list[str]:
    """Return a note about words that look meant for slurmddp and are arguments of the script.

    A script with a Hydra of its own may have `model` or `seed`, but hardly the keys that ask for nodes.
    """
    script = own_script(config["program"])
    if not script:  # A function may have `args` of any type.
        return []
    arguments = config["program"]["args"]
    misplaced = [argument for argument in arguments if argument in _STARTS_NOTHING or _asks_for_job(argument)]
    if not misplaced:
        return []
    return [
        f"{script} gets {' '.join(misplaced)} as its own arguments: settings and flags of slurmddp stand "
        f"before {script}."
    ]


def _asks_for_job(word: str) -> bool:
    key = TOP.get(key_of(word))
    return "=" in word and key is not None and not key.trainer and key.identity is not COMPUTED


def _unasked_memory(config: Mapping[str, Any]) -> list[str]:
    memory, cluster = config["mem_gb"], config["cluster"] or {}
    if memory is None or cluster.get("mem_request") != "none":
        return []
    return [f"mem_gb={memory} has no effect: with mem_request: none, the job requests no memory."]


def _unread_file(config: Mapping[str, Any], project_dir: Path, sources: Sources) -> list[str]:
    other, own = project_dir / sources.path / "config.yaml", project_dir / sources.file
    if config["program"].get("script") or not other.is_file() or own.is_file():
        return []
    return [
        f"{sources.path}/config.yaml is not read: a project's defaults for slurmddp belong in "
        f"{sources.file}, or say --config-name config."
    ]


def _name(config: Mapping[str, Any]) -> str:
    """Return the default of `name`: the name of the script, or of the model's class."""
    script = own_script(config["program"])
    if not script:
        return str(config["model"]["_target_"].rpartition(".")[2].lower())
    last = script.rpartition(".")[2] if script.startswith(MODULE) else Path(script).stem
    return paths.as_name(last.removeprefix(MODULE)) or "script"


def make_plan(overrides: Sequence[str], project_dir: Path, sources: Sources = DEFAULT) -> CompositionPlan:
    """Return the plan for Hydra; raises ConfigError for a file that can't be right."""
    refuse_files_of_others(project_dir / sources.path)
    own = defaults_file(project_dir, sources)
    content = _load_yaml(own) if own else {}
    searched = hydra_keys.search_path(content["hydra"], sources.file) if "hydra" in content else []
    if typed := [one for one in overrides if one.lstrip("+").startswith(f"{hydra_keys.SEARCH_PATH}=")]:
        searched = hydra_keys.texts(_parsed(typed[-1]), typed[-1])
        overrides = [one for one in overrides if one not in typed]
    run_code(project_dir, sources)
    roots = conf_roots(project_dir, sources, searched)
    for root in roots[:-1]:  # The last one is part of slurmddp.
        refuse_files_of_others(root)
    return plan_from(overrides, roots, content, sources.file, partial(signature_of, project_dir=project_dir))


def _files(plan: CompositionPlan, own: Path | None) -> Iterator[Path]:
    """Yield the files that a plan may read: of a group with a choice, the chosen one and what it includes."""
    if own is not None:
        yield own
    chosen = [item for item in plan.primary["defaults"] if isinstance(item, Mapping)]
    choices = {str(group): _names(choice) for item in chosen for group, choice in item.items()}
    for override in plan.overrides:  # `+experiment=long` chooses a file as well.
        group, _, choice = override.lstrip("+").partition("=")
        choices[group.partition("@")[0]] = _names(choice)
    waiting = [path for root in plan.roots for path in sorted(root.rglob("*.yaml")) if path != own]
    included: set[str] = set()
    is_new = True
    while is_new:  # A file that is included may include others.
        is_new = False
        for path in waiting.copy():
            if path.stem in included or _is_chosen(path, plan.roots, choices):
                is_new = True
                waiting.remove(path)
                with suppress(ConfigError):  # Hydra reports a chosen file that can't be read.
                    listed = _load_yaml(path).get("defaults", [])
                    included |= set(re.findall(r"[^\s/'@:,\[\]{}]+", str(listed)))
                yield path


def _names(choice: object) -> list[str]:
    """Return the names of the files that a choice stands for: `a`, or a list such as `[a,b]`."""
    return [name.strip(" '") for name in str(choice).strip("[]").split(",")]


def _is_chosen(path: Path, roots: Sequence[Path], choices: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a file is a choice of its group, or its group has no choice."""
    root = next(root for root in roots if path.is_relative_to(root))
    group = path.relative_to(root).parent.as_posix()
    return path.stem in choices.get("" if group == "." else group, [path.stem])


def _parsed(override: str) -> Any:
    """Return the value of a setting that Hydra itself reads."""
    try:
        return OverridesParser.create().parse_overrides([override])[0].value()
    except HydraException as error:
        raise hydra_errors.explain(error, [override]) from error


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except TROUBLE as error:
        why = " ".join(str(error).split())[:400]
        raise ConfigError(f"{path} can't be read: {why}.", hint="Correct the file.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no mapping.", hint="Write one `key: value` per line.")
    return {str(key): value for key, value in loaded.items()}


def compose_plan(plan: CompositionPlan, typed: Sequence[str], shared: Shared | None = None) -> dict[str, Any]:
    """Let Hydra compose a plan, and resolve the result without checking it; raises ConfigError."""
    try:
        composed = None if shared is None else _with_values(plan, shared)
        return _resolved(with_hydra(plan) if composed is None else composed)
    except TROUBLE as error:
        raise hydra_errors.explain(error, typed, plan.roots) from error
    finally:
        _left.clear()  # Files may change before another command.


@contextmanager
def initialized(plan: CompositionPlan) -> Iterator[str]:
    """Initialize Hydra for a plan; yields the name of the primary configuration."""
    primary = {**plan.primary, "defaults": [*plan.primary["defaults"], *_LEFT_OUT]}
    first, *others = plan.roots
    if others:
        primary["hydra"] = {"searchpath": [f"file://{root}" for root in others]}
    ConfigStore.instance().store(DEFAULTS_NODE, plan.base)
    ConfigStore.instance().store(_PRIMARY, primary)
    with initialize_config_dir(str(first), job_name="slurmddp", version_base="1.3"):
        yield _PRIMARY


def with_hydra(plan: CompositionPlan) -> DictConfig:
    """Compose a plan, Hydra's own node included; errors are Hydra's."""
    if (left := _left.pop(repr(plan), None)) is not None:
        return left
    with initialized(plan) as name:
        composed = hydra_compose(name, list(plan.overrides), return_hydra_config=True)
    for node in plan.replaced:
        _drop_arguments(composed, node, plan.overrides)
    _set_arguments(composed, plan)
    return composed


def _set_arguments(composed: DictConfig, plan: CompositionPlan) -> None:
    for key, arguments in plan.arguments.items():
        OmegaConf.update(composed, key, arguments, merge=False, force_add=True)


def _drop_arguments(composed: DictConfig, node: str, overrides: Sequence[str]) -> None:
    """Remove the arguments that files give to a class, because another class was typed."""
    typed = {key_of(text) for text in overrides}
    value = OmegaConf.select(composed, node)
    # A node that was typed as a whole holds nothing of a file.
    if not isinstance(value, DictConfig) or any(f"{node}.".startswith(f"{key}.") for key in typed):
        return
    plain: Any = OmegaConf.to_container(value, resolve=False)
    kept = {
        name: inner
        for name, inner in plain.items()
        if any(f"{key}.".startswith(f"{node}.{name}.") for key in typed)
    }
    OmegaConf.update(composed, node, kept, merge=False, force_add=True)


def _with_values(plan: CompositionPlan, shared: Shared) -> DictConfig | None:
    """Set the values of a plan in a copy of what Hydra composes without them.

    Returns:
        What `with_hydra` returns, without Hydra's node; None if only Hydra can set the values.
    """
    values = OverridesParser.create().parse_overrides(list(plan.overrides))
    if not all(_is_value(one) for one in values):
        return None
    files = repr((plan.base, plan.primary, plan.roots, plan.replaced))
    if files not in shared:
        composed = with_hydra(replace(plan, overrides=(), arguments={}))
        with open_dict(composed):
            del composed["hydra"]
        shared[files] = composed
    copy = deepcopy(shared[files])
    try:
        for one in values:
            OmegaConf.update(copy, one.key_or_group, one.value(), force_add=one.is_force_add())
        _set_arguments(copy, plan)
    except OmegaConfBaseException:
        return None  # Hydra explains the error.
    return None if "${hydra:" in "".join(_texts(OmegaConf.to_container(copy, resolve=False))) else copy


def are_independent(
    words: Sequence[str], keys: Sequence[str], project_dir: Path, sources: Sources, shared: Shared
) -> bool:
    """Return whether other values of the keys `keys` leave all else of a composed configuration as it is.

    Args:
        words: the command line, which `compose` takes.
        keys: keys of the configuration with plain values.
        project_dir: as for `compose`.
        sources: as for `compose`.
        shared: as for `compose`.
    """
    plan = make_plan(words, project_dir.absolute(), sources)
    composed = _with_values(plan, shared)
    # A function of a project gets its arguments in the types that Hydra gives them.
    if composed is None or any(key in EVERY_ARGUMENTS and key not in plan.arguments for key in keys):
        return False
    texts = [one for one in _texts(OmegaConf.to_container(composed, resolve=False)) if "${" in one]
    return all(_takes_any(composed, key) and not any(_may_read(text, key) for text in texts) for key in keys)


def _takes_any(composed: DictConfig, key: str) -> bool:
    """Return whether a key holds a value that Hydra replaces by any of its kind: no type, not read-only.

    The kind is a list for the arguments of a script, and a plain value for all other keys.
    """
    outer, _, last = key.rpartition(".")
    parent = OmegaConf.select(composed, outer) if outer else composed
    node = parent._get_node(last) if isinstance(parent, DictConfig) else None
    kind = ListConfig if key in EVERY_ARGUMENTS else AnyNode
    return type(node) is kind and not node._get_flag("readonly")


def _may_read(text: str, key: str) -> bool:
    """Return whether an expression may depend on a key: it names the key, or could name any key."""
    # A relative key, a resolver of the project, or a key that another expression names.
    if re.search(r"\$\{\s*\.|\$\{(?!\s*oc\.)[^}]*:|\$\{[^}]*\$\{", text):
        return True
    named = (word.strip(".") for word in re.findall(r"[\w.]+", text))
    return any(f"{key}.".startswith(f"{word}.") or word.startswith(f"{key}.") for word in named)


def _is_value(override: Override) -> bool:
    """Return whether an override sets one key, and chooses no file of a group."""
    plain = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
    key = override.key_or_group
    return plain and not (override.is_sweep_override() or override.package or key in GROUPS or "/" in key)


def _resolved(composed: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain values, without Hydra's node and the project's own keys."""
    with open_dict(composed):
        hydra = composed.pop("hydra", None)
    raw: Any = OmegaConf.to_container(composed, resolve=False, enum_to_str=True)
    texts = "\n".join(_texts(raw))
    if referred := re.findall(REFERENCE.pattern + r"hydra:([\w.]+)", texts):
        _let_refer(hydra, referred)
    container: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True, enum_to_str=True)
    expressions = config_secrets.expressions(raw, container)
    kept = {str(key): value for key, value in container.items() if not _is_referred_to(str(key), texts)}
    return {**kept, EXPRESSIONS: {key: one for key, one in expressions.items() if key in kept}}


def _let_refer(hydra: DictConfig, keys: Sequence[str]) -> None:
    """Let `${hydra:KEY}` find Hydra's node; raises ConfigError for a key that only a running job has."""
    for key in keys:
        if OmegaConf.select(hydra, key) is None:
            raise ConfigError(
                f"`${{hydra:{key}}}` has no value: slurmddp uses Hydra only to compose configurations.",
                hint="See `slurmddp train --cfg hydra`.",
            )
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": hydra})  # type: ignore[assignment]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of nested mappings and lists."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _is_referred_to(key: str, texts: str) -> bool:
    """Return whether a top-level key is the project's own, and the value of another key refers to it."""
    name = rf"\s*(oc\.select:\s*)?{re.escape(key)}(?![\w-])"
    return key not in TOP and re.search(REFERENCE.pattern + name, texts) is not None
