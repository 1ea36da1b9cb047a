"""Turn the command line and a project's defaults into one plan for Hydra: group choices and values.

Hydra has a sign for each way to set a value (`+`, `++`, none). A person need not know the signs, because the
schema decides afterwards whether a key is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from slurmddp.config.checks.signatures import Signature, unknown_argument
from slurmddp.config.composition import hydra_keys
from slurmddp.errors import ConfigError, near_matches
from slurmddp.settings.arguments import EVERY_ARGUMENTS, typed, unquoted
from slurmddp.settings.keys import GROUPS, NAMED_NODES, OPEN_NODES, TOP, defaults, every_key
from slurmddp.settings.schema import OWN_TRAINER

SignatureOf = Callable[[str], Signature | None]
_FORM = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w./@:-]*")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_PLAIN_CHOICE = re.compile(r"[\w./ ,-]+")
_SEVERAL_CHOICES = re.compile(r"\[[\w./ ,-]*\]")
DEFAULTS_NODE = "slurmddp_defaults"
"""Name of slurmddp's defaults in Hydra's list of defaults; the project's values lie above them."""


@dataclass(frozen=True)
class CompositionPlan:
    """A request to Hydra: slurmddp's defaults, the primary configuration and the values on top of it."""

    base: dict[str, Any]
    primary: dict[str, Any]
    overrides: tuple[str, ...]
    roots: tuple[Path, ...] = ()
    """The folders of groups, the first of which wins."""
    cluster: str | None = None
    """The chosen file of the group `cluster`, if any."""
    replaced: tuple[str, ...] = ()
    """The nodes whose `_target_` is typed: arguments in files are those of another class."""
    arguments: Mapping[str, list[str]] = field(default_factory=dict)
    """The arguments of a script as typed, by their keys. Hydra's grammar never reads them."""

    @property
    def has_cluster(self) -> bool:
        """Whether a cluster is chosen, or written out in the project's defaults or on the command line."""
        whole = any(text.startswith("++cluster=") for text in self.overrides)
        return self.cluster is not None or bool(self.primary.get("cluster")) or whole


@dataclass(frozen=True)
class Given:
    """One argument of the command line: its sign, key and value."""

    text: str
    sign: str
    key: str
    value: str | None

    @property
    def first(self) -> str:
        return self.key.partition(".")[0]


@dataclass
class _Draft:
    roots: Sequence[Path]
    choices: dict[str, str | None]
    base: dict[str, Any]
    content: dict[str, Any] = field(default_factory=dict)
    further: list[Any] = field(default_factory=list)
    """Items of the project's `defaults` that are no plain choice: files, packages, optional ones."""
    chosen: set[str] = field(default_factory=set)
    overrides: list[str] = field(default_factory=list)
    replaced: tuple[str, ...] = ()
    """As in the plan."""
    arguments: dict[str, list[str]] = field(default_factory=dict)
    """As in the plan."""


def options(roots: Sequence[Path], group: str) -> dict[str, Path]:
    """Return the choices of a group with their files. The first folder that has a choice wins."""
    found: dict[str, Path] = {}
    for root in roots:
        folder = root / group
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return found


def take_apart(text: str) -> Given:
    """Split one argument into sign, key and value; raises ConfigError for a text that is not a setting."""
    match = _FORM.fullmatch(text)
    if match is None or not _KEY.fullmatch(match["key"]):
        raise ConfigError(f"{text!r} is not a setting.", hint="Settings are written key=value.")
    given = Given(text, match["sign"], match["key"], match["value"])
    if hydra_keys.is_hydras(given.key):
        raise hydra_keys.refusal(text, given.key)
    return given


def plan_from(
    overrides: Sequence[str],
    roots: Sequence[Path],
    project: Mapping[str, Any],
    where: str,
    signature: SignatureOf,
) -> CompositionPlan:
    """Return the plan that joins slurmddp's defaults, the project's defaults and the command line.

    Args:
        overrides: the command line.
        roots: the folders of groups.
        project: the content of the project's file.
        where: the name of this file, for errors.
        signature: returns the signature of an import path if it can be read.
    """
    draft = _Draft(roots, dict(GROUPS), defaults())
    _lay_over(draft, project, where)
    given = [_with_target(take_apart(text), roots) for text in overrides]
    for one in given:
        _refuse_plain_section(one)
    for one in given:
        if _is_choice(one, roots):
            _choose(draft, one)
    chosen = {one.key for one in given if _is_choice(one, roots)}
    draft.replaced = tuple(node for one in given if (node := _replaced(one)) and node not in chosen)
    for one in given:
        if one.key in EVERY_ARGUMENTS and one.value is not None and _runs_script(draft):
            draft.arguments[one.key] = typed(one.value)
        elif not _is_choice(one, roots):
            draft.overrides.append(_with_sign(one, draft, signature))
    if draft.choices.get("cluster") is not None:
        draft.content.pop("cluster", None)
    listed = [{group: choice} for group, choice in draft.choices.items() if choice is not None]
    primary = {"defaults": [DEFAULTS_NODE, *listed, *draft.further, "_self_"], **draft.content}
    return CompositionPlan(
        draft.base,
        primary,
        tuple(draft.overrides),
        tuple(roots),
        draft.choices.get("cluster"),
        draft.replaced,
        draft.arguments,
    )


def _add_default(draft: _Draft, item: Any, where: str) -> None:
    """Add one item of the `defaults` of a project: a choice, or an item that Hydra reads as it stands."""
    if item == "_self_":
        return
    if not (isinstance(item, str) or (isinstance(item, Mapping) and len(item) == 1)):
        raise ConfigError(f"`defaults` in {where} holds {item!r}.", hint="Write `- group: choice`.")
    head, choice = next(iter(item.items())) if isinstance(item, Mapping) else (item, None)
    *keywords, group = str(head).split(" ")
    group = group.lstrip("/")
    if hydra_keys.is_hydras(group):
        raise hydra_keys.refusal(f"{head}: {choice} in {where}", group)
    if isinstance(item, str) or "@" in group or "optional" in keywords or isinstance(choice, list):
        draft.further.append(item)
    else:
        draft.choices[group] = None if choice is None else str(choice)
        draft.chosen.add(group)


def _lay_over(draft: _Draft, project: Mapping[str, Any], where: str) -> None:
    """Lay the project's file over slurmddp's defaults."""
    listed = project.get("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(f"`defaults` in {where} is not a list.", hint="Write `- group: choice` lines.")
    for item in listed:
        _add_default(draft, item, where)
    for key, value in project.items():
        if key in ("defaults", "hydra"):
            continue
        _refuse_plain(key, value, where, draft.roots)
        own = key in OPEN_NODES and isinstance(value, Mapping) and "_target_" in value
        if own and key not in draft.chosen:
            draft.choices.pop(key, None)
            draft.content[key] = dict(value)
        else:
            draft.content[key] = value


def _refuse_plain(key: str, value: Any, where: str, roots: Sequence[Path]) -> None:
    """Refuse a plain value, in the project's file, of a key that holds other keys."""
    known = TOP.get(key)
    if known is None or isinstance(value, (Mapping, NoneType)) or (isinstance(value, str) and "${" in value):
        return
    if not (known.sections or known.is_group):
        return
    hint = f"Write `{key}:` with keys below it, such as `  name: value`."
    if known.is_group and str(value) in options(roots, key):
        hint = f"To choose the file {value}.yaml, write `- {key}: {value}` below `defaults:`."
    raise ConfigError(f"`{key}` in {where} is {value!r}, but must be a mapping of keys to values.", hint=hint)


def _refuse_plain_section(given: Given) -> None:
    """Refuse `train=3`: the key holds other keys."""
    known = TOP.get(given.key)
    is_section = known is not None and bool(known.sections) and not known.is_group
    value = (given.value or "").strip()
    if is_section and value and not value.startswith(("{", "$")) and value not in ("null", "None"):
        raise ConfigError(
            f"`{given.key}` is {value!r}, but must be a mapping of keys to values.",
            hint=f"Say {given.key}.KEY=VALUE, one for each key.",
        )


def _with_target(given: Given, roots: Sequence[Path]) -> Given:
    """Return `GROUP._target_=package.Class` for `GROUP=package.Class`, unless a file has that name."""
    path = unquoted((given.value or "").strip())
    if given.key not in GROUPS or given.key not in OPEN_NODES or not _CLASS.fullmatch(path):
        return given
    return (
        given
        if path.removesuffix(".yaml") in options(roots, given.key)
        else replace(given, key=f"{given.key}._target_")
    )


def _is_choice(given: Given, roots: Sequence[Path]) -> bool:
    """Return whether an argument chooses files of a group (`model=gpt`) instead of setting a value."""
    value = given.value
    if value is not None and not _PLAIN_CHOICE.fullmatch(unquoted(value.strip())) and not _is_list(given):
        return False
    if given.key in GROUPS:
        return not _is_list(given)
    return (
        "." not in given.key
        and given.key not in TOP
        and (any((root / given.key).is_dir() for root in roots) or _is_stored(given.key))
    )


def _is_list(given: Given) -> bool:
    """Return whether an argument has a list of choices, `[a,b]`, all of which Hydra reads."""
    return bool(_SEVERAL_CHOICES.fullmatch((given.value or "").strip()))


def _is_stored(group: str) -> bool:
    """Return whether the project's code has registered structured configs under a group."""
    node: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return isinstance(node, dict)


def _choose(draft: _Draft, given: Given) -> None:
    if _is_list(given) and given.sign != "~":
        _choose_several(draft, given)
        return
    choice = "null" if given.sign == "~" else unquoted((given.value or "").strip()).removesuffix(".yaml")
    if "," in choice:
        raise ConfigError(f"{given.text!r} names several choices.", hint="For a run of each add --multirun.")
    draft.chosen.add(given.key)
    if choice in ("null", "None"):
        draft.choices[given.key] = None
    elif given.key in draft.choices or given.key in GROUPS:
        draft.choices[given.key] = choice
    else:
        draft.overrides.append(f"+{given.key}={choice}")


def _choose_several(draft: _Draft, given: Given) -> None:
    """Choose all files of a list, in place of what the project's file chooses for this group."""
    is_single = draft.choices.pop(given.key, None) is not None
    is_listed = any(isinstance(item, Mapping) and given.key in item for item in draft.further)
    if is_single:
        names = [name.strip() for name in (given.value or "").strip()[1:-1].split(",")]
        draft.further.append({given.key: [name for name in names if name]})
    elif is_listed:
        draft.overrides.append(f"{given.key}={given.value}")
    else:
        draft.overrides.append(f"+{given.key}={given.value}")


def _replaced(given: Given) -> str:
    """Return the node whose class an argument names; empty for another argument."""
    node, _, last = given.key.rpartition(".")
    has_class = given.first in (*OPEN_NODES, *NAMED_NODES, "loggers")
    return node if has_class and last == "_target_" and given.sign != "~" else ""


def _is_inside(key: str, nodes: Iterable[str]) -> bool:
    return any(key.startswith(f"{node}.") for node in nodes)


def _with_sign(given: Given, draft: _Draft, signature: SignatureOf) -> str:
    """Return the argument with the sign that Hydra needs. The schema checks the key afterwards."""
    if given.value is None and given.sign != "~":
        raise _no_value(given, draft.roots)
    if given.sign == "~" or "@" in given.key:
        return given.text
    if given.value is not None and given.key in GROUPS and not given.value.strip().startswith(("{", "$")):
        known = options(draft.roots, given.key)
        if (name := unquoted(given.value.strip())) in known:
            hint = f"Rename {name}.yaml with letters, digits, blanks and _ - . alone."
            raise ConfigError(f"{given.key}={name} names a file, and Hydra can't read its name.", hint=hint)
        raise ConfigError(
            f"`{given.key}={given.value}` names no choice.", hint=near_matches(given.value, known)
        )
    by_class = given.first in OPEN_NODES and (TOP[given.first].is_open or not TOP[given.first].sections)
    strict = given.sign == "" and by_class and "." in given.key
    if strict and not _is_inside(given.key, draft.replaced) and not _is_argument(given, draft, signature):
        return given.text
    return f"++{given.key}={given.value}"


def _runs_script(draft: _Draft) -> bool:
    """Return whether the arguments are those of a script; another function gets its keys in their types."""
    program = {**draft.base.get("program", {}), **(draft.content.get("program") or {})}
    return program.get("_target_") == OWN_TRAINER and "program" not in draft.replaced


def _is_argument(given: Given, draft: _Draft, signature: SignatureOf) -> bool:
    """Return whether a key is an argument of the class that a file names for its node.

    Returns:
        False also if the class or its signature is not known; then only keys of the file can be changed.

    Raises:
        ConfigError: the signature is known and has no such argument.
    """
    node = _node_of(given, draft)
    name = given.key.rpartition(".")[2]
    if name.startswith("_") or not isinstance(target := node.get("_target_"), str):
        return False
    known = signature(target)
    if known is not None and name not in known.names and name not in node:
        raise unknown_argument(given.key, target, known, is_typed=True)
    return known is not None and name in known.names


def _node_of(given: Given, draft: _Draft) -> Mapping[str, Any]:
    """Return the mapping in a file that holds the key of an argument; empty if no file is read for it."""
    value: Any = draft.content.get(given.first)
    if value is None and (choice := draft.choices.get(given.first)) is not None:
        file = options(draft.roots, given.first).get(choice)
        with suppress(OSError, yaml.YAMLError):  # Hydra reads the file as well, and explains the error.
            value = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    for name in given.key.split(".")[1:-1]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _no_value(given: Given, roots: Sequence[Path]) -> ConfigError:
    for group in GROUPS:
        if given.key in options(roots, group):
            return ConfigError(f"{given.text!r} is not a setting.", hint=f"Did you mean {group}={given.key}?")
    if given.key.endswith(".py"):
        hint = f"A script runs as `slurmddp run {given.key}`, with its arguments after it."
        return ConfigError(f"{given.text!r} is a script, not a setting.", hint=hint)
    hint = f"Say {given.key}=VALUE."
    if given.key not in TOP and given.key not in every_key():
        hint = f"Say key=value. {near_matches(given.key, TOP)}"
    return ConfigError(f"{given.text!r} has no value.", hint=hint)
