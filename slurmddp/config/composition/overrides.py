"""Turn the command line and a project's defaults into one plan for Hydra: group choices and values.

Hydra has a sign for each way to set a value: `+`, `++` or none. A user need not know the signs, because the
schema decides afterwards whether a key exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from slurmddp.config.checks.signatures import Signature, unknown_argument
from slurmddp.config.composition import hydra_keys
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.settings.arguments import EVERY_ARGUMENTS, typed, unquoted
from slurmddp.settings.keys import GROUPS, NAMED_NODES, OPEN_NODES, TOP, defaults, every_key
from slurmddp.settings.schema import OWN_TRAINER

SignatureOf = Callable[[str], Signature | None]
"""A function that returns the signature of an import path, if the source of the class can be read."""
_FORM = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w./@:-]*")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_PLAIN_CHOICE = re.compile(r"[\w./ ,-]+")
_SEVERAL_CHOICES = re.compile(r"\[[\w./ ,-]*\]")
DEFAULTS_NODE = "slurmddp_defaults"
"""Name of slurmddp's defaults in Hydra's list of defaults; the project's values override them."""


@dataclass(frozen=True)
class CompositionPlan:
    """The input from which Hydra composes a configuration: defaults, primary configuration and overrides."""

    base: dict[str, Any]
    """slurmddp's defaults."""
    primary: dict[str, Any]
    """The choices of groups under `defaults`, and the values of the project's file."""
    overrides: tuple[str, ...]
    """Values of the command line, with the signs that Hydra needs."""
    roots: tuple[Path, ...] = ()
    """The folders with groups; the first folder that has a file wins."""
    cluster: str | None = None
    """The chosen file of the group `cluster`; None if no file is chosen."""
    replaced: tuple[str, ...] = ()
    """The nodes whose `_target_` was typed. Their arguments in files are dropped, because these fit another
    class."""
    arguments: Mapping[str, list[str]] = field(default_factory=dict)
    """The arguments of a script as typed, by key. They never pass Hydra's grammar."""

    @property
    def has_cluster(self) -> bool:
        """Whether a cluster is chosen by name, or given as a mapping by a file or the command line."""
        is_typed = any(text.startswith("++cluster=") for text in self.overrides)
        return self.cluster is not None or bool(self.primary.get("cluster")) or is_typed


@dataclass(frozen=True)
class TypedSetting:
    """A setting of the command line: its whole text, sign, key and value."""

    text: str
    sign: str
    key: str
    value: str | None
    """The text after the `=`; None for a word without `=`."""

    @property
    def top(self) -> str:
        """The key of the top level: `train` for `train.steps`."""
        return self.key.partition(".")[0]


@dataclass
class _Draft:
    """An unfinished plan; fields without a description have the same meaning as in `CompositionPlan`."""

    roots: Sequence[Path]
    choices: dict[str, str | None]
    """The chosen file of each group; None if the group is left out."""
    base: dict[str, Any]
    content: dict[str, Any] = field(default_factory=dict)
    """The values of the project's file."""
    other_defaults: list[Any] = field(default_factory=list)
    """Items of the project's `defaults` that are not plain choices: files, packages, optional choices."""
    chosen: set[str] = field(default_factory=set)
    """The groups for which the project's file or the command line chooses a file."""
    overrides: list[str] = field(default_factory=list)
    replaced: tuple[str, ...] = ()
    arguments: dict[str, list[str]] = field(default_factory=dict)


def options(roots: Sequence[Path], group: str) -> dict[str, Path]:
    """Return the files of a group by their names; of equal names, the file of the first folder."""
    files: dict[str, Path] = {}
    for root in roots:
        folder = root / group
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            files.setdefault(name, path)

    return files


def parse_setting(text: str) -> TypedSetting:
    """Split a setting into sign, key and value; raise ConfigError for a text that is not a setting."""
    match = _FORM.fullmatch(text)
    if match is None or not _KEY.fullmatch(match["key"]):
        raise ConfigError(f"{text!r} is not a setting.", hint="Settings are written key=value.")

    setting = TypedSetting(text, match["sign"], match["key"], match["value"])
    if hydra_keys.is_hydras(setting.key):
        raise hydra_keys.refusal(text, setting.key)
    return setting


def plan_from(
    overrides: Sequence[str],
    roots: Sequence[Path],
    project: Mapping[str, Any],
    file: str,
    signature: SignatureOf,
) -> CompositionPlan:
    """Return the plan that joins slurmddp's defaults, the project's defaults and the command line.

    Args:
        overrides: the settings of the command line.
        roots: the folders with groups.
        project: the content of the file of the project's defaults.
        file: the name of this file, for messages.
        signature: returns the signature of an import path; None if its source can't be read.

    Raises:
        ConfigError: a setting or the file of the project's defaults is wrong.
    """
    draft = _Draft(roots, dict(GROUPS), defaults())
    _merge_project_file(draft, project, file)

    settings = [_with_target(parse_setting(text), roots) for text in overrides]
    for setting in settings:
        _refuse_plain_section(setting)

    choices = [setting for setting in settings if _is_choice(setting, roots)]
    for choice in choices:
        _choose(draft, choice)

    # A node for which the command line also chooses a file keeps the arguments of that file.
    chosen_now = {choice.key for choice in choices}
    replaced = map(_replaced_node, settings)
    draft.replaced = tuple(node for node in replaced if node and node not in chosen_now)

    for setting in settings:
        if setting.key in EVERY_ARGUMENTS and setting.value is not None and _runs_script(draft):
            draft.arguments[setting.key] = typed(setting.value)
        elif setting not in choices:
            draft.overrides.append(_with_sign(setting, draft, signature))

    # A chosen cluster file replaces the whole mapping `cluster` of the project's file: it is not merged.
    if draft.choices.get("cluster") is not None:
        draft.content.pop("cluster", None)

    listed = [{group: name} for group, name in draft.choices.items() if name is not None]
    primary = {"defaults": [DEFAULTS_NODE, *listed, *draft.other_defaults, "_self_"], **draft.content}
    return CompositionPlan(
        draft.base,
        primary,
        tuple(draft.overrides),
        tuple(roots),
        draft.choices.get("cluster"),
        draft.replaced,
        draft.arguments,
    )


def _add_default(draft: _Draft, item: Any, file: str) -> None:
    """Add an item of the project's `defaults` to a draft.

    `group: choice` is added to the choices, which the command line may replace. Any other item is passed on
    to Hydra unchanged: a file, a package, `optional`, or a list of choices.
    """
    if item == "_self_":
        return

    if isinstance(item, Mapping) and len(item) == 1:
        head, choice = next(iter(item.items()))
    elif isinstance(item, str):
        head = item
        choice = None
    else:
        raise ConfigError(
            f"`defaults` in {file} holds {item!r}, which chooses no file.", hint="Write `- group: choice`."
        )

    *keywords, group = str(head).split(" ")
    group = group.lstrip("/")
    if hydra_keys.is_hydras(group):
        raise hydra_keys.refusal(f"{head}: {choice} in {file}", group)

    if isinstance(item, str) or "@" in group or "optional" in keywords or isinstance(choice, list):
        draft.other_defaults.append(item)
    else:
        draft.choices[group] = None if choice is None else str(choice)
        draft.chosen.add(group)


def _merge_project_file(draft: _Draft, project: Mapping[str, Any], file: str) -> None:
    """Add the choices and values of the project's file to a draft, over slurmddp's defaults."""
    listed = project.get("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(f"`defaults` in {file} is not a list.", hint="Write `- group: choice` lines.")
    for item in listed:
        _add_default(draft, item, file)

    for key, value in project.items():
        if key in ("defaults", "hydra"):
            continue

        _refuse_plain(key, value, file, draft.roots)
        draft.content[key] = value
        # A node with its own class must not get the arguments of slurmddp's default file, so this file is
        # not chosen.
        has_class = key in OPEN_NODES and isinstance(value, Mapping) and "_target_" in value
        if has_class and key not in draft.chosen:
            draft.choices.pop(key, None)


def _refuse_plain(key: str, value: Any, file: str, roots: Sequence[Path]) -> None:
    """Raise ConfigError if a section or group has a plain value in the project's file, such as `train: 3`."""
    known = TOP.get(key)
    if known is None or not (known.sections or known.is_group):
        return
    if isinstance(value, (Mapping, NoneType)) or (isinstance(value, str) and "${" in value):
        return

    hint = f"Write `{key}:` with keys below it, such as `  name: value`."
    if known.is_group and str(value) in options(roots, key):
        hint = f"To choose the file {value}.yaml, write `- {key}: {value}` below `defaults:`."
    raise ConfigError(f"`{key}` in {file} is {value!r}, but must be a mapping of keys to values.", hint=hint)


def _refuse_plain_section(setting: TypedSetting) -> None:
    """Raise ConfigError if a setting gives a plain value to a section, such as `train=3`."""
    known = TOP.get(setting.key)
    if known is None or not known.sections or known.is_group:
        return

    value = (setting.value or "").strip()
    if value and not value.startswith(("{", "$")) and value not in ("null", "None"):
        raise ConfigError(
            f"`{setting.key}` is {value!r}, but must be a mapping of keys to values.",
            hint=f"Use {setting.key}.KEY=VALUE for each key.",
        )


def _with_target(setting: TypedSetting, roots: Sequence[Path]) -> TypedSetting:
    """Return the setting of `GROUP._target_` for `GROUP=package.Class`; any other setting unchanged.

    A file of the group with the name `package.Class` takes precedence.
    """
    path = unquoted((setting.value or "").strip())
    if setting.key not in GROUPS or setting.key not in OPEN_NODES or not _CLASS.fullmatch(path):
        return setting
    if path.removesuffix(".yaml") in options(roots, setting.key):
        return setting
    return replace(setting, key=f"{setting.key}._target_")


def _is_choice(setting: TypedSetting, roots: Sequence[Path]) -> bool:
    """Return whether a setting chooses files of a group (`model=gpt`) instead of setting a value."""
    value = setting.value
    if value is not None and not _PLAIN_CHOICE.fullmatch(unquoted(value.strip())) and not _is_list(setting):
        return False
    if setting.key in GROUPS:
        return not _is_list(setting)
    if "." in setting.key or setting.key in TOP:
        return False
    # Any other key is a group if the project has a folder or a structured config of this name.
    return any((root / setting.key).is_dir() for root in roots) or _is_stored(setting.key)


def _is_list(setting: TypedSetting) -> bool:
    """Return whether a setting has a list of choices, such as `model=[a,b]`; Hydra merges these files."""
    return bool(_SEVERAL_CHOICES.fullmatch((setting.value or "").strip()))


def _is_stored(group: str) -> bool:
    """Return whether code of the project has registered structured configs under a group."""
    node: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return isinstance(node, dict)


def _choose(draft: _Draft, setting: TypedSetting) -> None:
    """Add the choice of a setting, such as `model=gpt` or `~model`, to a draft."""
    if _is_list(setting) and setting.sign != "~":
        _choose_several(draft, setting)
        return

    choice = unquoted((setting.value or "").strip()).removesuffix(".yaml")
    if setting.sign == "~":
        choice = "null"
    if "," in choice:
        raise ConfigError(
            f"{setting.text!r} names several choices, but one run has one choice.",
            hint="Add --multirun for one run of each choice.",
        )

    draft.chosen.add(setting.key)
    if choice in ("null", "None"):
        draft.choices[setting.key] = None
    elif setting.key in draft.choices or setting.key in GROUPS:
        draft.choices[setting.key] = choice
    else:
        draft.overrides.append(f"+{setting.key}={choice}")


def _choose_several(draft: _Draft, setting: TypedSetting) -> None:
    """Add a list of choices to a draft; it replaces the group's choice in the project's file."""
    is_single = draft.choices.pop(setting.key, None) is not None
    is_listed = any(isinstance(item, Mapping) and setting.key in item for item in draft.other_defaults)
    if is_single:
        names = [name.strip() for name in (setting.value or "").strip()[1:-1].split(",")]
        draft.other_defaults.append({setting.key: [name for name in names if name]})
    elif is_listed:
        draft.overrides.append(f"{setting.key}={setting.value}")
    else:
        draft.overrides.append(f"+{setting.key}={setting.value}")


def _replaced_node(setting: TypedSetting) -> str:
    """Return the node whose `_target_` a setting sets: `model` for `model._target_=a.B`; else empty."""
    node, _, last = setting.key.rpartition(".")
    if last != "_target_" or setting.sign == "~":
        return ""
    return node if setting.top in (*OPEN_NODES, *NAMED_NODES, "loggers") else ""


def _with_sign(setting: TypedSetting, draft: _Draft, signature: SignatureOf) -> str:
    """Return a setting with the sign that Hydra needs: `++`, which sets a key whether it exists or not.

    Unknown keys are refused later, when the configuration is checked against the schema.
    """
    if setting.value is None and setting.sign != "~":
        raise _no_value(setting, draft.roots)
    if setting.sign == "~" or "@" in setting.key:
        return setting.text

    value = (setting.value or "").strip()
    if setting.key in GROUPS and not value.startswith(("{", "$")):
        raise _no_choice(setting.key, setting.value or "", draft.roots)

    # No sign is added here, so that Hydra refuses the key if no file holds it: it may be misspelled.
    if _must_be_in_file(setting, draft) and not _is_argument(setting, draft, signature):
        return setting.text
    return f"++{setting.key}={setting.value}"


def _must_be_in_file(setting: TypedSetting, draft: _Draft) -> bool:
    """Return whether a setting may only change an argument that a file already contains, not add one.

    This holds for a setting without a sign, such as `model.width=3`, below a node whose class was not typed.
    """
    if setting.sign or setting.top not in OPEN_NODES or "." not in setting.key:
        return False
    if TOP[setting.top].sections and not TOP[setting.top].is_open:
        return False
    return not any(setting.key.startswith(f"{node}.") for node in draft.replaced)


def _runs_script(draft: _Draft) -> bool:
    """Return whether `program.args` holds arguments of a script, which are kept as typed.

    False if `program` names another function, for which `args` is an argument of any type.
    """
    program = {**draft.base.get("program", {}), **(draft.content.get("program") or {})}
    return program.get("_target_") == OWN_TRAINER and "program" not in draft.replaced


def _is_argument(setting: TypedSetting, draft: _Draft, signature: SignatureOf) -> bool:
    """Return whether a key is an argument of the class that a file names for the key's node.

    Returns:
        Also False if the class or its signature is unknown. Then only keys in the file can be changed.

    Raises:
        ConfigError: the signature is known and has no such argument.
    """
    node = _node_of(setting, draft)
    name = setting.key.rpartition(".")[2]
    target = node.get("_target_")
    if name.startswith("_") or not isinstance(target, str):
        return False

    known = signature(target)
    if known is None:
        return False
    if name not in known.names and name not in node:
        raise unknown_argument(setting.key, target, known, is_typed=True)
    return name in known.names


def _node_of(setting: TypedSetting, draft: _Draft) -> Mapping[str, Any]:
    """Return the mapping to which a setting's key belongs, from the project's file or the chosen file.

    Empty if neither file has such a mapping, or if the chosen file can't be read.
    """
    value: Any = draft.content.get(setting.top)
    if value is None:
        choice = draft.choices.get(setting.top)
        file = None if choice is None else options(draft.roots, setting.top).get(choice)
        # An error is ignored here, because Hydra reads the file later and reports it.
        with suppress(OSError, yaml.YAMLError):
            value = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None

    for name in setting.key.split(".")[1:-1]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _no_choice(group: str, value: str, roots: Sequence[Path]) -> ConfigError:
    """Return the error for a setting of a group whose value names no file."""
    known = options(roots, group)
    name = unquoted(value.strip())
    if name in known:
        return ConfigError(
            f"{group}={name} names a file, but Hydra can't read the name of this file.",
            hint=f"Rename {name}.yaml: use only letters, digits, blanks and _ - .",
        )
    return ConfigError(f"`{group}={value}` names no choice.", hint=near_matches(value, known))


def _no_value(setting: TypedSetting, roots: Sequence[Path]) -> ConfigError:
    """Return the error for a word without `=`, which may be a choice, a script or a key."""
    for group in GROUPS:
        if setting.key in options(roots, group):
            return ConfigError(
                f"{setting.text!r} is not a setting.", hint=f"Did you mean {group}={setting.key}?"
            )

    if setting.key.endswith(".py"):
        return ConfigError(
            f"{setting.text!r} is a script, not a setting.",
            hint=f"A script runs as `slurmddp run {setting.key}`, with its arguments after it.",
        )

    hint = f"Use {setting.key}=VALUE."
    if setting.key not in TOP and setting.key not in every_key():
        hint = f"Settings are written key=value. {near_matches(setting.key, TOP)}"
    return ConfigError(f"{setting.text!r} has no value.", hint=hint)
