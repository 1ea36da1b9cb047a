"""Check values against the schema; an error names the key, the value that was given, and a right one.

OmegaConf's structured configs are too generous: they accept 2 as true, true as the text "True", and NaN.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Literal, TypeVar, get_args, get_origin

from slurmddp.errors import ConfigError, near_matches
from slurmddp.settings.keys import Key, keys
from slurmddp.settings.schema import Cluster, Config, NamedTargetNodes, TargetNode
from slurmddp.settings.spec import SPECIAL_KEYS
from slurmddp.settings.unknown_keys import refuse_misplaced, unknown_key
from slurmddp.short_text import shorten

Section = TypeVar("Section")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of an address. One slash is left of two in a `Path`."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT = "a text"
_SHELL_LINE = "a shell line"
_OPTION = "a text, a number or true"
_EXPECTED: dict[Any, tuple[str, str]] = {
    (str,): (_TEXT, ""),
    (int,): ("a whole number", "1"),
    (float,): ("a number", "1.5"),
    (bool,): ("true or false (or on, off)", "true"),
    (int, Literal["auto"]): ("auto or a whole number", "auto"),
    (int, str): ('a time such as "HH:MM:SS", "90m" or a number of minutes', "02:00:00"),
    (TargetNode,): ("a mapping with a `_target_`", ""),
    (NamedTargetNodes,): ("a mapping of names to mappings with a `_target_`", ""),
    (tuple[str, ...],): ("a list of texts", ""),
    (Mapping[str, str],): ("a mapping of names to texts", ""),
    (Mapping[str, str | int | bool],): ("a mapping of options to texts, numbers or true", ""),
}
"""The name and an example of each kind of value."""
_SECTION = ("a mapping of keys to values", "")


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole configuration with typed values; raises ConfigError for the first wrong value."""
    refuse_misplaced(config)
    return check_section(config, Config)


def read_section(given: Mapping[str, Any], section: type[Section], prefix: str) -> Section:
    """Return the dataclass `section` with the checked values of `given`; raises ConfigError."""
    return section(**check_section(given, section, prefix))


def check_section(
    given: Mapping[str, Any], section: type, prefix: str = "", *, is_open: bool = False
) -> dict[str, Any]:
    """Return the typed values of `given` in the order of the schema, with defaults for missing keys.

    An open section keeps unknown keys, and gets no defaults.
    """
    known = keys(section, prefix)
    if unknown := [key for key in given if key not in known and not is_open]:
        raise unknown_key(str(unknown[0]), known, prefix)
    if section is Cluster:  # Cluster files list keys without a value.
        given = {key: value for key, value in given.items() if value is not None}
    if is_open:
        return {
            key: check_value(value, known[key]) if key in known else value for key, value in given.items()
        }
    return {key: check_value(given.get(key, one.default), one) for key, one in known.items()}


def check_value(value: Any, key: Key) -> Any:
    """Return one value in the type of its key; raises ConfigError for a value that does not fit."""
    if value is None or value is MISSING:
        if key.optional:
            return None
        raise _missing(key) if value is MISSING else _wrong(key.name, value, key.types, key.doc)
    if key.sections:
        return _check_inner(value, key)
    converted = _converted(key.name, value, key.types)
    if converted is None:
        raise _wrong(key.name, value, key.types, key.doc)
    if str in key.types and _CONTROL.search(str(converted)):
        raise _with_control(key.name, value)
    _check_bounds(value, converted, key)
    return converted


def check_special_keys(key: str, node: Mapping[str, Any]) -> None:
    """Refuse an unknown `_key_` beside `_target_`, and a wrong value of a known one."""
    where = f"{key}." if key else ""
    right = {
        "_args_": lambda value: value is None or isinstance(value, list),
        "_partial_": lambda value: isinstance(value, bool),
        "_recursive_": lambda value: isinstance(value, bool),
        "_convert_": lambda value: str(value).lower() in ("none", "partial", "object", "all"),
    }
    for name, value in node.items():
        if str(name).startswith("_") and str(name).endswith("_") and name not in SPECIAL_KEYS:
            raise ConfigError(
                f"`{where}{name}` is not understood.", hint=near_matches(str(name), SPECIAL_KEYS)
            )
        if name in right and not right[name](value):
            raise ConfigError(f"`{where}{name}` is {value!r}; it must be {SPECIAL_KEYS[name]}.")


def check_folder(name: str, path: str) -> None:
    """Refuse an address such as s3://bucket in place of a folder; it would become a folder called `s3:`.

    Args:
        name: of the setting or argument.
        path: its value.
    """
    if _ADDRESS.match(path):
        raise ConfigError(
            f"`{name}` is {path}, an address, but must be the path of a folder.",
            hint="Give a folder on a disk that all ranks reach.",
        )


def _check_inner(value: Any, key: Key) -> dict[str, Any]:
    """Return the checked keys of a section. If a key has several sections, `name` selects one.

    A class of the person's own, beside the sections, checks its arguments itself.
    """
    given = _as_mapping(value)
    if given is None:
        raise _wrong(key.name, value, key.types, key.doc)
    if TargetNode in key.types and "_target_" in given:
        return given
    prefix = f"{key.name}."
    if len(key.sections) == 1:
        return check_section(given, key.sections[0], prefix, is_open=key.is_open)
    by_name = {keys(one)["name"].default: one for one in key.sections}
    if given.get("name") not in by_name:
        raise _no_choice(f"{prefix}name", given.get("name"), by_name)
    checked = check_section(given, by_name[given["name"]], prefix)
    return {name: inner for name, inner in checked.items() if inner is not None}


def _check_bounds(value: Any, converted: Any, key: Key) -> None:
    if converted == "auto":
        return
    bounds = (
        (key.minimum, operator.ge, "at least", f"{key.minimum} or more"),
        (key.above, operator.gt, "above", "null for no limit"),
        (key.maximum, operator.le, "at most", f"{key.maximum} or less"),
    )
    for bound, fits, words, right in bounds:
        if bound is not None and not fits(converted, bound):
            raise ConfigError(
                f"`{key.name}` is {value}, but must be {words} {bound} ({key.doc}).",
                hint=f"Say {key.name}={right}.",
            )


def _converted(name: str, value: Any, types: tuple[Any, ...]) -> Any:
    """Return `value` in the first type that fits, or None."""
    for kind in types:
        if get_origin(kind) is Literal and len(types) == 1 and _as(kind, value, name) is None:
            raise _no_choice(name, value, get_args(kind))
        if (found := _as(kind, value, name)) is not None:
            return found
    return None


def _as(kind: Any, value: Any, name: str) -> Any:
    if kind is Any:
        return value
    if kind is str:
        return _as_text(value)
    if kind is int:
        return _as_whole(value)
    if kind is float:
        return _as_number(value)
    if kind is bool:
        return _as_flag(value)
    if kind == TargetNode:
        return _as_mapping(value)
    if kind == NamedTargetNodes:
        return _nodes(value, name)
    if get_origin(kind) is Literal:
        text = _as_text(value)  # YAML and Hydra read `precision=32` as a number.
        return text if text in get_args(kind) else None
    if get_origin(kind) is tuple:
        return _lines(value, name)
    return _variables(value, name) if get_args(kind)[1] is str else _options(value, name)


def _as_text(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None


def _as_whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_number(value: Any) -> float | int | None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if right else None


def _as_flag(value: Any) -> bool | None:
    """Return a flag. YAML reads `on` and `off` as flags, but Hydra's command line leaves them as texts."""
    if isinstance(value, str):
        return {"on": True, "off": False}.get(value)
    return value if isinstance(value, bool) else None


def _as_mapping(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) else None


def _nodes(value: Any, name: str) -> dict[str, Any] | None:
    mapping = _as_mapping(value)
    for key, one in (mapping or {}).items():
        _check_name(key, name)
        if _as_mapping(one) is None:
            raise _wrong(f"{name}.{key}", one, (TargetNode,), f"one of `{name}`")
    return mapping


def _check_name(key: str, name: str) -> None:
    if not _VARIABLE.fullmatch(key):
        raise ConfigError(
            f"`{name}` has the name {key!r}.", hint="Names hold letters, digits and underscores."
        )


def _lines(value: Any, name: str) -> list[str] | None:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)):
        return None
    for index, line in enumerate(lines):
        if not isinstance(line, str) or "\0" in line:
            raise _wrong(f"{name}[{index}]", line, _SHELL_LINE, "it runs before the training")
    return list(lines)


def _variables(value: Any, name: str) -> dict[str, str] | None:
    mapping = _as_mapping(value)
    for key, variable in (mapping or {}).items():
        _check_name(key, name)
        if not isinstance(variable, (str, int, float)) or isinstance(variable, bool):
            raise _wrong(f"{name}.{key}", variable, _TEXT, "an environment variable")
    return None if mapping is None else {key: str(variable) for key, variable in mapping.items()}


def _options(value: Any, name: str) -> dict[str, Any] | None:
    """Return the options without those that are null."""
    if (mapping := _as_mapping(value)) is None:
        return None
    given = {key: option for key, option in mapping.items() if option is not None}
    for key, option in given.items():
        if not isinstance(option, (str, int)):
            raise _wrong(f"{name}.{key}", option, _OPTION, "an option")
        if isinstance(option, str) and _CONTROL.search(option):
            raise _with_control(f"{name}.{key}", option)
        if option == "":
            raise ConfigError(
                f"`{name}.{key}` is empty, and an option without its value is refused by SLURM.",
                hint="Give a value; true stands for an option that takes none, and null leaves it out.",
            )
    return given


def _missing(key: Key) -> ConfigError:
    expected, _ = _EXPECTED.get(key.types, _SECTION)
    return ConfigError(f"`{key.name}` is missing: {key.doc}.", hint=f"Give it {expected}.")


def _no_choice(name: str, value: Any, choices: Any) -> ConfigError:
    near = near_matches(str(value), choices, else_all=False)
    return ConfigError(f"`{name}` can't be {value!r}; it is one of {', '.join(choices)}.", hint=near)


def _with_control(name: str, value: str) -> ConfigError:
    return ConfigError(
        f"`{name}` is {value!r}, which holds a line break or another control character.",
        hint="Give it in one line of plain characters.",
    )


def _wrong(name: str, value: Any, expected: tuple[Any, ...] | str, doc: str) -> ConfigError:
    """Return the error for a value of another type; `expected` holds the types, or the name of a type."""
    is_text = expected in (_TEXT, _SHELL_LINE, _OPTION, (str,))
    words, example = (expected, "") if isinstance(expected, str) else _EXPECTED.get(expected, _SECTION)
    given = "empty" if value in (None, "") else f"{shorten(repr(value), 80)} ({_kind_of(value)})"
    hint = "See `slurmddp train --cfg` for the shape."
    if example:
        hint = f"For example {name}={example}."
    elif is_text:
        hint = f"Quote it if it should be a text: '{name}=\"...\"'."
    return ConfigError(f"`{name}` is {given}, but must be {words} ({doc}).", hint=hint)


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "a mapping" if isinstance(value, Mapping) else type(value).__name__)
