"""Compose the command line, the project's files and slurmddp's files into one checked configuration.

Hydra searches the files of groups (`model`, `data`, `loss`, `optimizer`, `scheduler`, `strategy`, `cluster`,
and groups of the project) in the project's `conf/` first, then in slurmddp's. The project's
`conf/slurmddp.yaml` holds its defaults: values of keys, and under `defaults:` the choices of groups. A
`conf/config.yaml` may belong to another program; it is read only with `--config-name config`.
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

import hydra
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
"""Flags of `slurmddp run` that start nothing. Typed after the script, they would be its arguments."""
_LEFT_OUT = [
    {"override hydra/job_logging": "none"},
    {"override hydra/hydra_logging": "none"},
    *({f"override hydra/{part}": None} for part in ("help", "hydra_help", "launcher", "sweeper", "output")),
]
"""Parts of Hydra that only run programs; without them, composing takes a third less time."""
_IS_HYDRA_1_3 = hydra.__version__.startswith("1.3.")
_STORE_OPTIONS: dict[str, Any] = {} if _IS_HYDRA_1_3 else {"replace": True}
"""Arguments of `ConfigStore.store`: without them, Hydra 1.4 warns if a name is stored a second time."""
_BASE_OPTIONS: dict[str, Any] = {"version_base": "1.3"} if _IS_HYDRA_1_3 else {}
"""Arguments of Hydra's initialize: Hydra 1.3 warns if `version_base` is missing, Hydra 1.4 if it is given."""
CompositionCache = dict[str, DictConfig]
"""Cache of compositions, keyed by config files, before value overrides are applied."""
_last_composition: dict[str, DictConfig] = {}
"""The last composition of `login_node`, by its plan. `compose` reuses it, because Hydra takes 0.1 s."""
COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    RecursionError,
)
"""Errors of Hydra, OmegaConf and YAML about wrong settings and files."""


def compose(
    overrides: Sequence[str],
    project_dir: Path,
    sources: Sources = DEFAULT,
    *,
    cache: CompositionCache | None = None,
) -> dict[str, Any]:
    """Return the whole configuration, resolved and checked.

    Args:
        overrides: the settings of the command line.
        project_dir: the project's folder.
        sources: the folders and the file that the flags `--config-path`, `--config-name` and `--config-dir`
            name.
        cache: compositions for other command lines, such as other points of a sweep; updated by this call.
            The files are read only once for all command lines that choose the same files.

    Returns:
        The value of each key of the schema, in its type.

    Raises:
        ConfigError: a setting or a file is wrong.
    """
    project_dir = project_dir.absolute()
    paths.check_project(project_dir)
    for text in overrides:
        paths.check_utf8("The setting", text)

    plan = make_plan(overrides, project_dir, sources)
    composed = compose_plan(plan, overrides, cache)
    expressions = composed.pop(EXPRESSIONS)
    cluster = composed.get("cluster")
    if isinstance(cluster, dict) and plan.cluster:
        cluster["name"] = cluster.get("name") or plan.cluster

    unquoted_values.refuse_respelled(composed, overrides, _files(plan, defaults_file(project_dir, sources)))
    config = check(composed)
    _refuse_without_cluster(config, plan)
    config = sbatch_environment.fill(config, os.environ)
    refuse_malformed_address(config, os.environ)
    _check_code(config, project_dir)

    config["name"] = config["name"] or _name(config)
    paths.check_name(config["name"])
    paths.check_data(relevant(config), project_dir)
    if config["program"].get("script"):
        for key in EVERY_ARGUMENTS:
            name = key.removeprefix("program.")
            config["program"][name] = script_words(config["program"].get(name))

    config["project_dir"] = str(project_dir)
    if expressions:
        config[EXPRESSIONS] = expressions
    return config


def _refuse_without_cluster(config: Mapping[str, Any], plan: CompositionPlan) -> None:
    """Raise ConfigError if `cluster` or `ssh` is set, but no cluster is chosen."""
    if plan.has_cluster:
        return
    if config["cluster"] is not None:
        raise ConfigError("A key of `cluster` is set, but no cluster is chosen.", hint="Use +cluster=NAME.")
    if config["ssh"]:
        raise ConfigError(
            f"ssh={config['ssh']} is set, but no cluster is chosen.", hint="Use +cluster=NAME as well."
        )


def _check_code(config: Mapping[str, Any], project_dir: Path) -> None:
    """Raise ConfigError for import paths, loggers and programs that the ranks would not find."""
    same_python = not (config["cluster"] and config["cluster"]["python"])
    paths.check_targets(config, project_dir, same_python=same_python)
    paths.check_python(config)
    paths.check_loggers(config["loggers"], project_dir, same_python=same_python)
    paths.check_program(config, project_dir, same_python=same_python)


def login_node(
    overrides: Sequence[str], project_dir: Path, sources: Sources = DEFAULT
) -> dict[str, str | None] | None:
    """Return `ssh`, `ssh_folder` and `python` of the login node on which a command must run.

    All other keys stay unresolved and unchecked, because the login node resolves them.

    Returns:
        The values by key; `ssh_folder` and `python` may be None. None instead of a dict if the command runs
        on this machine: no host is set, launcher=local, or the command already came over ssh. Also None if
        the configuration can't be composed; `compose` raises that error later.

    Raises:
        ConfigError: `ssh` is not the name of a host, or `ssh_folder` or `python` is not a text.
    """
    if os.environ.get(OVER_SSH_VARIABLE):
        return None

    try:
        plan = make_plan(overrides, project_dir.absolute(), sources)
        if not plan.has_cluster:
            return None
        composed = with_hydra(plan)
        _last_composition.clear()
        host = OmegaConf.select(composed, "ssh") or OmegaConf.select(composed, "cluster.ssh")
        launcher = OmegaConf.select(composed, "launcher")
        folder = OmegaConf.select(composed, "cluster.ssh_folder")
        python = OmegaConf.select(composed, "cluster.python")
    except (ConfigError, *COMPOSITION_ERRORS):
        return None

    if not host or launcher == "local":
        _last_composition[repr(plan)] = composed
        return None

    # The name must not hold a colon or slash: runs are named HOST:NAME, and HOST is the name of a folder.
    if not isinstance(host, str) or not re.fullmatch(r"(?!-)[\w.@%+-]+", host):
        raise ConfigError(
            f"ssh={host!r} is not the name of a host.", hint="Give a host of your ~/.ssh/config: ssh=login1."
        )
    for name, value in (("cluster.ssh_folder", folder), ("cluster.python", python)):
        if not isinstance(value, str | None):
            raise ConfigError(f"{name}={value!r} is not a path.", hint="Give a path on the login node.")
    return {"ssh": host, "ssh_folder": folder, "python": python}


def unread(config: Mapping[str, Any], project_dir: Path, sources: Sources = DEFAULT) -> list[str]:
    """Return a note for each setting or file that has no effect, or probably not the intended effect."""
    return [
        *_unread_file(config, project_dir, sources),
        *_unasked_memory(config),
        *_literal_variables(config),
        *_after_script(config),
    ]


def _literal_variables(config: Mapping[str, Any]) -> list[str]:
    """Return a note for each value under `cluster.env` that holds a `$`, which no shell replaces."""
    env = (config["cluster"] or {}).get("env", {})
    return [
        f"cluster.env.{name} is the text {value}, because no shell reads it. For the variable of the node, "
        f"write `export {name}={value}` under `setup:`; for the variable of this machine, ${{oc.env:NAME}}."
        for name, value in env.items()
        if re.search(r"\$[A-Za-z_{]", value)
    ]


def _after_script(config: Mapping[str, Any]) -> list[str]:
    """Return a note if settings or flags of slurmddp were written after the script, as its arguments.

    Only keys of the job, such as `nodes=2`, count. A script that uses Hydra itself may take `seed=1` or
    `model=gpt`.
    """
    script = own_script(config["program"])
    # If the program is a function, `args` is one of its arguments and no command line.
    if not script:
        return []

    arguments = config["program"]["args"]
    misplaced = [argument for argument in arguments if argument in _STARTS_NOTHING or _asks_for_job(argument)]
    if not misplaced:
        return []
    return [
        f"{script} gets {' '.join(misplaced)} as arguments. Settings and flags of slurmddp are written "
        f"before {script}."
    ]


def _asks_for_job(argument: str) -> bool:
    """Return whether an argument of a script looks like a setting of the job, such as `nodes=2`."""
    key = TOP.get(key_of(argument))
    return "=" in argument and key is not None and not key.trainer and key.identity is not COMPUTED


def _unasked_memory(config: Mapping[str, Any]) -> list[str]:
    """Return a note if `mem_gb` is set, but the cluster file has `mem_request: none`."""
    memory = config["mem_gb"]
    cluster = config["cluster"] or {}
    if memory is None or cluster.get("mem_request") != "none":
        return []
    return [f"mem_gb={memory} has no effect: with mem_request: none, the job requests no memory."]


def _unread_file(config: Mapping[str, Any], project_dir: Path, sources: Sources) -> list[str]:
    """Return a note if the project has conf/config.yaml, which is not read, but no conf/slurmddp.yaml."""
    has_other_file = (project_dir / sources.path / "config.yaml").is_file()
    if config["program"].get("script") or not has_other_file or (project_dir / sources.file).is_file():
        return []
    return [
        f"{sources.path}/config.yaml is not read. Write a project's defaults for slurmddp to "
        f"{sources.file}, or use --config-name config."
    ]


def _name(config: Mapping[str, Any]) -> str:
    """Return the default of the key `name`: the script's file name, or the model's class, in lower case."""
    script = own_script(config["program"])
    if not script:
        return str(config["model"]["_target_"].rpartition(".")[2].lower())

    last = Path(script).stem
    if script.startswith(MODULE):
        last = script.rpartition(".")[2].removeprefix(MODULE)
    return paths.as_name(last) or "script"


def make_plan(overrides: Sequence[str], project_dir: Path, sources: Sources = DEFAULT) -> CompositionPlan:
    """Return the plan from which Hydra composes the configuration of a command line.

    The Python file beside the project's defaults is run first.

    Raises:
        ConfigError: a setting or the file of the project's defaults is wrong.
    """
    refuse_files_of_others(project_dir / sources.path)
    project_file = defaults_file(project_dir, sources)
    content = _load_yaml(project_file) if project_file else {}

    searched: list[str] = []
    if "hydra" in content:
        searched = hydra_keys.search_path(content["hydra"], sources.file)
    typed = [text for text in overrides if text.lstrip("+").startswith(f"{hydra_keys.SEARCH_PATH}=")]
    if typed:
        searched = hydra_keys.texts(_parsed(typed[-1]), typed[-1])
        overrides = [text for text in overrides if text not in typed]

    run_code(project_dir, sources)
    roots = conf_roots(project_dir, sources, searched)
    # The last folder belongs to slurmddp itself, so it need not be checked.
    for root in roots[:-1]:
        refuse_files_of_others(root)
    return plan_from(overrides, roots, content, sources.file, partial(signature_of, project_dir=project_dir))


def _files(plan: CompositionPlan, project_file: Path | None) -> Iterator[Path]:
    """Yield the YAML files that Hydra may read: the project's defaults, chosen files, and included files.

    Files are recognized by their names, so a file may be yielded that Hydra does not read.
    """
    if project_file is not None:
        yield project_file

    chosen = [item for item in plan.primary["defaults"] if isinstance(item, Mapping)]
    choices = {str(group): _names(choice) for item in chosen for group, choice in item.items()}
    # An override may choose a file, too: `+experiment=long`.
    for override in plan.overrides:
        group, _, choice = override.lstrip("+").partition("=")
        choices[group.partition("@")[0]] = _names(choice)

    waiting = [path for root in plan.roots for path in sorted(root.rglob("*.yaml")) if path != project_file]
    included: set[str] = set()
    is_new = True
    # Repeated until no file is added, because an included file may include further files.
    while is_new:
        is_new = False
        for path in waiting.copy():
            if path.stem in included or _is_chosen(path, plan.roots, choices):
                is_new = True
                waiting.remove(path)
                # A file that can't be read is no error here, because Hydra reports it.
                with suppress(ConfigError):
                    listed = _load_yaml(path).get("defaults", [])
                    included |= set(re.findall(r"[^\s/'@:,\[\]{}]+", str(listed)))
                yield path


def _names(choice: object) -> list[str]:
    """Return the file names in a choice: `["a"]` for `a`, `["a", "b"]` for `[a,b]`."""
    return [name.strip(" '") for name in str(choice).strip("[]").split(",")]


def _is_chosen(path: Path, roots: Sequence[Path], choices: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a file is chosen in its group; also True if no file is chosen in its group."""
    root = next(root for root in roots if path.is_relative_to(root))
    group = path.relative_to(root).parent.as_posix()
    return path.stem in choices.get("" if group == "." else group, [path.stem])


def _parsed(override: str) -> Any:
    """Return the value of a setting in Hydra's grammar; raise ConfigError if it can't be read."""
    try:
        return OverridesParser.create().parse_overrides([override])[0].value()
    except HydraException as error:
        raise hydra_errors.explain(error, [override]) from error


def _load_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; raise ConfigError unless it is a readable mapping."""
    try:
        loaded = _plain(OmegaConf.load(path))
    except COMPOSITION_ERRORS as error:
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"{path} can't be read: {reason}.", hint="Correct the file.") from error

    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} does not hold a YAML mapping.", hint="Write one `key: value` per line.")
    return {str(key): value for key, value in loaded.items()}


def compose_plan(
    plan: CompositionPlan, typed: Sequence[str], cache: CompositionCache | None = None
) -> dict[str, Any]:
    """Return the composed configuration of a plan, with references resolved, but unchecked.

    Args:
        plan: the plan.
        typed: the settings as typed, for messages.
        cache: as for `compose`.

    Returns:
        The values by key. `EXPRESSIONS` holds the expressions whose values come from the environment.

    Raises:
        ConfigError: Hydra can't compose the plan, or a reference can't be resolved.
    """
    try:
        composed = None if cache is None else _with_values(plan, cache)
        if composed is None:
            composed = with_hydra(plan)
        return _resolved(composed)
    except COMPOSITION_ERRORS as error:
        raise hydra_errors.explain(error, typed, plan.roots) from error
    finally:
        # The composition is dropped, because the files may change before the next composition.
        _last_composition.clear()


@contextmanager
def initialized(plan: CompositionPlan) -> Iterator[str]:
    """Initialize Hydra for a plan inside the block; yield the name of the primary configuration."""
    primary = {**plan.primary, "defaults": [*plan.primary["defaults"], *_LEFT_OUT]}
    first, *others = plan.roots
    if others:
        primary["hydra"] = {"searchpath": [f"file://{root}" for root in others]}

    ConfigStore.instance().store(DEFAULTS_NODE, plan.base, **_STORE_OPTIONS)
    ConfigStore.instance().store(_PRIMARY, primary, **_STORE_OPTIONS)
    with initialize_config_dir(str(first), job_name="slurmddp", **_BASE_OPTIONS):
        yield _PRIMARY


def with_hydra(plan: CompositionPlan) -> DictConfig:
    """Return Hydra's composition of a plan, unresolved, with Hydra's own configuration under `hydra`.

    Raises one of `COMPOSITION_ERRORS` for a wrong setting or file.
    """
    earlier = _last_composition.pop(repr(plan), None)
    if earlier is not None:
        return earlier

    with initialized(plan) as name:
        composed = hydra_compose(name, list(plan.overrides), return_hydra_config=True)
    for node in plan.replaced:
        _drop_arguments(composed, node, plan.overrides)
    _set_arguments(composed, plan)
    return composed


def _set_arguments(composed: DictConfig, plan: CompositionPlan) -> None:
    """Set the arguments of a script in a composition exactly as they were typed."""
    for key, arguments in plan.arguments.items():
        OmegaConf.update(composed, key, arguments, merge=False, force_add=True)


def _drop_arguments(composed: DictConfig, node: str, overrides: Sequence[str]) -> None:
    """Remove from a node the arguments that come from files.

    They belong to the class that the file names, but the command line has another class for the node.
    Arguments that were typed stay.
    """
    typed = {key_of(text) for text in overrides}
    value = OmegaConf.select(composed, node)
    # If the node was typed as a whole, nothing in it comes from files.
    if not isinstance(value, DictConfig) or any(f"{node}.".startswith(f"{key}.") for key in typed):
        return

    plain = _plain(value)
    kept = {
        name: inner
        for name, inner in plain.items()
        if any(f"{key}.".startswith(f"{node}.{name}.") for key in typed)
    }
    OmegaConf.update(composed, node, kept, merge=False, force_add=True)


def _with_values(plan: CompositionPlan, cache: CompositionCache) -> DictConfig | None:
    """Return the composition of a plan's files, from the cache if possible, with the plan's values set in it.

    Returns:
        The result of `with_hydra` without `hydra`; None if an override is more than a value of a key, or if
        the configuration refers to `hydra`, so that Hydra must compose the whole plan.
    """
    overrides = OverridesParser.create().parse_overrides(list(plan.overrides))
    if not all(map(_is_value, overrides)):
        return None

    files = repr((plan.base, plan.primary, plan.roots, plan.replaced))
    if files not in cache:
        composed = with_hydra(replace(plan, overrides=(), arguments={}))
        with open_dict(composed):
            del composed["hydra"]
        cache[files] = composed

    copy = deepcopy(cache[files])
    try:
        for override in overrides:
            OmegaConf.update(copy, override.key_or_group, override.value(), force_add=override.is_force_add())
        _set_arguments(copy, plan)
    except OmegaConfBaseException:
        # On None the caller composes the whole plan with Hydra, whose error explains more.
        return None

    texts = "".join(_texts(_plain(copy)))
    return None if "${hydra:" in texts else copy


def are_independent(
    overrides: Sequence[str],
    keys: Sequence[str],
    project_dir: Path,
    sources: Sources,
    cache: CompositionCache,
) -> bool:
    """Return whether the rest of a configuration stays the same if the values of `keys` change.

    Args:
        overrides: the settings of the command line.
        keys: keys whose values are numbers, texts or arguments of a script.
        project_dir: as for `compose`.
        sources: as for `compose`.
        cache: as for `compose`.
    """
    plan = make_plan(overrides, project_dir.absolute(), sources)
    composed = _with_values(plan, cache)
    # Only arguments of a script are set as typed. Those of a function get their types from Hydra's grammar.
    if composed is None or any(key in EVERY_ARGUMENTS and key not in plan.arguments for key in keys):
        return False

    texts = [text for text in _texts(_plain(composed)) if "${" in text]
    return all(_takes_any(composed, key) and not any(_may_read(text, key) for text in texts) for key in keys)


def _takes_any(composed: DictConfig, key: str) -> bool:
    """Return whether Hydra would accept any value for a key: it has no type and is not read-only.

    Arguments of a script must be a list in `composed`; any other key must hold a number, a text or null.
    """
    outer, _, last = key.rpartition(".")
    parent = OmegaConf.select(composed, outer) if outer else composed
    node = parent._get_node(last) if isinstance(parent, DictConfig) else None
    kind = ListConfig if key in EVERY_ARGUMENTS else AnyNode
    return type(node) is kind and not node._get_flag("readonly")


def _may_read(text: str, key: str) -> bool:
    """Return whether the value of an expression `${...}` may depend on the value of a key."""
    # A relative key, a resolver of the project and a key that is itself computed may read any key.
    if re.search(r"\$\{\s*\.|\$\{(?!\s*oc\.)[^}]*:|\$\{[^}]*\$\{", text):
        return True
    named = (word.strip(".") for word in re.findall(r"[\w.]+", text))
    return any(f"{key}.".startswith(f"{word}.") or word.startswith(f"{key}.") for word in named)


def _is_value(override: Override) -> bool:
    """Return whether an override only sets the value of one key: no choice, sweep, package or removal."""
    plain = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
    key = override.key_or_group
    return plain and not (override.is_sweep_override() or override.package or key in GROUPS or "/" in key)


def _resolved(composed: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain values, with references resolved.

    Left out are `hydra`, and top keys that the schema does not list and to which another value refers.
    `EXPRESSIONS` is added as for `compose_plan`.
    """
    with open_dict(composed):
        hydra = composed.pop("hydra", None)

    raw = _plain(composed, enum_to_str=True)
    texts = "\n".join(_texts(raw))
    referred = re.findall(REFERENCE.pattern + r"hydra:([\w.]+)", texts)
    if referred:
        _let_refer(hydra, referred)

    container = _plain(composed, resolve=True, enum_to_str=True)
    expressions = config_secrets.expressions(raw, container)
    kept = {str(key): value for key, value in container.items() if not _is_referred_to(str(key), texts)}
    kept[EXPRESSIONS] = {key: value for key, value in expressions.items() if key in kept}
    return kept


def _let_refer(hydra: DictConfig, keys: Sequence[str]) -> None:
    """Make Hydra's configuration available to `${hydra:KEY}`.

    Raises:
        ConfigError: a key has no value, because Hydra sets it only when it runs a job.
    """
    for key in keys:
        if OmegaConf.select(hydra, key) is None:
            raise ConfigError(
                f"`${{hydra:{key}}}` has no value: slurmddp uses Hydra only to compose configurations.",
                hint="`slurmddp train --cfg hydra` prints the keys that have a value.",
            )
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": hydra})  # type: ignore[assignment]


def _plain(node: Any, *, resolve: bool = False, enum_to_str: bool = False) -> Any:
    """Return the values of a node of OmegaConf in dicts and lists.

    Args:
        node: the node.
        resolve: whether to resolve references, and to refuse `???`.
        enum_to_str: whether to replace members of an Enum by their names.
    """
    container = OmegaConf.to_container(
        node, resolve=resolve, throw_on_missing=resolve, enum_to_str=enum_to_str
    )
    return _with_lists(container)


def _with_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, which OmegaConf 2.4 keeps and 2.3 turns into lists."""
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(inner) for inner in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _is_referred_to(key: str, texts: str) -> bool:
    """Return whether a top key is not in the schema, but another value refers to it."""
    name = rf"\s*(oc\.select:\s*)?{re.escape(key)}(?![\w-])"
    return key not in TOP and re.search(REFERENCE.pattern + name, texts) is not None
