"""Turn the command line and a project's defaults into one plan for Hydra: group choices and values.

Hydra has a sign for each way to set a value (`+`, `++`, none). A person need not know the signs, because the
schema decides afterwards whether a key is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp.config.schema import GROUPS, OPEN_NODES, OWN_TRAINER, TOP, defaults
from slurmddp.config.script_arguments import quoted, typed, unquoted
from slurmddp.errors import ConfigError, near_matches

_FORM = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w./@:-]*")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_PLAIN_CHOICE = re.compile(r"[\w./ ,-]+")
PROJECT_DEFAULTS = "slurmddp.yaml"
_WHERE = f"conf/{PROJECT_DEFAULTS}"


@dataclass(frozen=True)
class Plan:
    """A request to Hydra: the primary configuration and the values on top of it."""

    primary: dict[str, Any]
    overrides: tuple[str, ...]
    cluster: str | None = None
    """The chosen file of the group `cluster`, if any."""

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
    content: dict[str, Any]
    chosen: set[str] = field(default_factory=set)
    overrides: list[str] = field(default_factory=list)


def conf_roots(project_dir: Path) -> list[Path]:
    """Return the folders with configuration groups, the project's `conf/` first."""
    package, own = Path(slurmddp.__file__).parent / "conf", project_dir / "conf"
    return [own, package] if own.is_dir() and own.resolve() != package.resolve() else [package]


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
    if given.first.partition("/")[0] == "hydra":
        raise ConfigError(
            f"{text!r} sets Hydra itself, which slurmddp uses only to compose configurations.",
            hint="Leave it out; `runs_dir=` says where run folders are.",
        )
    return given


def plan_from(overrides: Sequence[str], roots: Sequence[Path], project: Mapping[str, Any]) -> Plan:
    """Return the plan that joins slurmddp's defaults, the project's defaults and the command line."""
    draft = _Draft(roots, dict(GROUPS), defaults())
    _lay_over(draft, project)
    given = [_with_target(take_apart(text), roots) for text in overrides]
    for one in given:
        if _is_choice(one, roots):
            _choose(draft, one)
    _start_afresh(draft, given)
    for one in given:
        if not _is_choice(one, roots):
            draft.overrides.append(_with_sign(one, draft))
    if draft.choices.get("cluster") is not None:
        draft.content.pop("cluster", None)
    listed = [{group: choice} for group, choice in draft.choices.items() if choice is not None]
    primary = {"defaults": [*listed, "_self_"], **draft.content}
    return Plan(primary, tuple(draft.overrides), draft.choices.get("cluster"))


def _choices_in(defaults: Any) -> dict[str, str | None]:
    """Return the choices in the `defaults` of a project."""
    choices: dict[str, str | None] = {}
    if not isinstance(defaults, list):
        raise ConfigError(f"`defaults` in {_WHERE} is not a list.", hint="Write `- group: choice` lines.")
    for item in defaults:
        if isinstance(item, Mapping) and len(item) == 1:
            (group, choice), *_ = item.items()
            choices[str(group).split(" ")[-1].lstrip("/")] = None if choice is None else str(choice)
        elif item != "_self_":
            raise ConfigError(f"`defaults` in {_WHERE} holds {item!r}.", hint="Write `- group: choice`.")
    return choices


def _lay_over(draft: _Draft, project: Mapping[str, Any]) -> None:
    """Lay the project's `conf/slurmddp.yaml` over slurmddp's defaults."""
    chosen = _choices_in(project.get("defaults", []))
    draft.choices |= chosen
    draft.chosen |= chosen.keys()
    for key, value in project.items():
        if key == "defaults":
            continue
        if key == "hydra":
            raise ConfigError(
                f"{_WHERE} sets `hydra`, and slurmddp uses Hydra only to compose configurations.",
                hint="Leave it out; groups of your own are folders of conf/.",
            )
        own = key in OPEN_NODES and isinstance(value, Mapping) and "_target_" in value
        if own and key not in draft.chosen:
            draft.choices.pop(key, None)
            draft.content[key] = dict(value)
        else:
            draft.content[key] = _merged(draft.content.get(key), value)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


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
    """Return whether an argument chooses a file of a group (`model=gpt`) instead of setting a value."""
    if given.value is not None and not _PLAIN_CHOICE.fullmatch(unquoted(given.value.strip())):
        return False
    if given.key in GROUPS:
        return True
    return (
        "." not in given.key and given.key not in TOP and any((root / given.key).is_dir() for root in roots)
    )


def _choose(draft: _Draft, given: Given) -> None:
    choice = "null" if given.sign == "~" else unquoted((given.value or "").strip()).removesuffix(".yaml")
    if "," in choice:
        raise ConfigError(f"{given.text!r} names several choices.", hint="Start one run for each of them.")
    draft.chosen.add(given.key)
    if choice in ("null", "None"):
        draft.choices[given.key] = None
    elif given.key in GROUPS:
        draft.choices[given.key] = choice
    else:
        draft.overrides.append(f"+{given.key}={choice}")


def _start_afresh(draft: _Draft, given: Iterable[Given]) -> None:
    """Empty a node whose `_target_` is set, because its keys are arguments of another class."""
    for one in given:
        node = one.first
        names_class = one.key == f"{node}._target_" and one.sign != "~"
        if names_class and node in OPEN_NODES and node not in draft.chosen:
            draft.choices.pop(node, None)
            draft.content[node] = {}
            draft.chosen.add(node)


def _with_sign(given: Given, draft: _Draft) -> str:
    """Return the argument with the sign that Hydra needs. The schema checks the key afterwards."""
    if given.value is None and given.sign != "~":
        raise _no_value(given, draft.roots)
    if given.sign == "~" or "@" in given.key:
        return given.text
    if given.value is not None and given.key in GROUPS and not given.value.strip().startswith(("{", "$")):
        known = near_matches(given.value, options(draft.roots, given.key))
        raise ConfigError(f"`{given.key}={given.value}` names no choice.", hint=known)
    if (
        given.key in ("program.args", "program.resume_args")
        and draft.content["program"].get("_target_") == OWN_TRAINER
    ):
        items = ",".join(quoted(one) for one in typed(given.value or ""))
        return f"++{given.key}=[{items}]"
    by_class = given.first in OPEN_NODES and (TOP[given.first].is_open or not TOP[given.first].sections)
    strict = given.sign == "" and by_class and "." in given.key
    fresh = draft.content.get(given.first) == {}
    return given.text if strict and not fresh else f"++{given.key}={given.value}"


def _no_value(given: Given, roots: Sequence[Path]) -> ConfigError:
    for group in GROUPS:
        if given.key in options(roots, group):
            sign = "+" if group == "cluster" else ""
            return ConfigError(
                f"{given.text!r} is not a setting.", hint=f"Did you mean {sign}{group}={given.key}?"
            )
    if given.key in ("job", "hydra", "all"):
        hint = "`--cfg` takes no value: it prints the whole configuration."
        return ConfigError(f"{given.text!r} has no value.", hint=hint)
    if given.key.endswith(".py"):
        hint = f"A script runs as `slurmddp run {given.key}`, with its arguments after it."
        return ConfigError(f"{given.text!r} is a script, not a setting.", hint=hint)
    hint = f"Say {given.key}=VALUE." if given.key in TOP else f"Say key=value. {near_matches(given.key, TOP)}"
    return ConfigError(f"{given.text!r} has no value.", hint=hint)
