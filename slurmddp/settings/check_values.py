"""Check values against the schema; an error names the key, the given value and an example of a right value.

OmegaConf's structured configs would accept too much: 2 as true, true as the text "True", and NaN.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Literal, TypeVar, get_args, get_origin

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.settings.keys import Key, keys
from slurmddp.settings.schema import Cluster, Config, NamedTargetNodes, TargetNode
from slurmddp.settings.spec import SPECIAL_KEYS
from slurmddp.settings.unknown_keys import refuse_misplaced, unknown_key
from slurmddp.short_text import shorten

Section = TypeVar("Section")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches the beginning of an address such as s3://bucket, of whose two slashes a `Path` keeps only one."""
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
"""By the types of a key, a description of right values for messages, and an example (empty without one)."""
_SECTION = ("a mapping of keys to values", "")
"""The description and example of a section, whose types are not in `_EXPECTED`."""


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole configuration with each value in the type of its key, and defaults for missing keys.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    refuse_misplaced(config)
    return check_section(config, Config)


def read_section(given: Mapping[str, Any], section: type[Section], prefix: str) -> Section:
    """Return an instance of the dataclass `section` with the checked values of `given`.

    Args:
        given: the values by key; missing keys get their defaults.
        section: the dataclass.
        prefix: the section's name and a dot, for messages.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    return section(**check_section(given, section, prefix))


def check_section(
    given: Mapping[str, Any], section: type, prefix: str = "", *, is_open: bool = False
) -> dict[str, Any]:
    """Return the values of a section, each in the type of its key, in the order of the schema.

    Missing keys get their defaults.

    Args:
        given: the values of the section by key.
        section: the dataclass that describes the section.
        prefix: the section's name and a dot, for messages; empty at the top level.
        is_open: whether unknown keys are kept unchecked. An open section gets no defaults, and keeps the
            order of `given`.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    known = keys(section, prefix)
    if is_open:
        checked = dict(given)
        for name in given:
            if name in known:
                checked[name] = check_value(given[name], known[name])
        return checked

    unknown = [name for name in given if name not in known]
    if unknown:
        raise unknown_key(str(unknown[0]), known, prefix)

    # A cluster file may have a key without a value, which YAML reads as null. The key gets its default.
    if section is Cluster:
        given = {name: value for name, value in given.items() if value is not None}
    return {name: check_value(given.get(name, key.default), key) for name, key in known.items()}


def check_value(value: Any, key: Key) -> Any:
    """Return a value in the type of its key; None if the key is optional and the value is missing or None.

    Raises:
        ConfigError: the value has another type, is out of bounds, holds a control character, or is missing.
    """
    if key.optional and (value is None or value is MISSING):
        return None
    if value is MISSING:
        raise _missing(key)
    if value is None:
        raise _wrong(key.name, value, key.types, key.doc)

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
    """Raise ConfigError for wrong special keys of Hydra, such as `_partial_`, beside a `_target_`.

    Wrong are unknown keys of the form `_key_`, and known keys with a value of another type.

    Args:
        key: the full name of the node; empty for a node at the top level.
        node: a mapping with `_target_`.
    """
    prefix = f"{key}." if key else ""
    is_right = {
        "_args_": lambda value: value is None or isinstance(value, list),
        "_partial_": lambda value: isinstance(value, bool),
        "_recursive_": lambda value: isinstance(value, bool),
        "_convert_": lambda value: str(value).lower() in ("none", "partial", "object", "all"),
    }

    for name, value in node.items():
        text = str(name)
        if text.startswith("_") and text.endswith("_") and name not in SPECIAL_KEYS:
            raise ConfigError(
                f"`{prefix}{name}` is not a special key of Hydra.", hint=near_matches(text, SPECIAL_KEYS)
            )
        if name in is_right and not is_right[name](value):
            raise ConfigError(f"`{prefix}{name}` is {value!r}, but must be {SPECIAL_KEYS[name]}.")


def check_folder(name: str, path: str) -> None:
    """Raise ConfigError if the path of a folder is an address, such as s3://bucket.

    Otherwise a folder with the name `s3:` would be created.

    Args:
        name: the name of the setting or argument, for messages.
        path: its value.
    """
    if _ADDRESS.match(path):
        raise ConfigError(
            f"`{name}` is {path}, an address, but must be the path of a folder.",
            hint="Give a folder on a disk that all ranks can reach.",
        )


def _check_inner(value: Any, key: Key) -> dict[str, Any]:
    """Return the checked values of a section.

    If the key may hold several sections, as `strategy` does, the value's `name` selects the section.
    """
    given = _as_mapping(value)
    if given is None:
        raise _wrong(key.name, value, key.types, key.doc)

    # Don't check the keys beside `_target_`: they are arguments of the user's class, which checks them
    # itself.
    if TargetNode in key.types and "_target_" in given:
        return given

    prefix = f"{key.name}."
    if len(key.sections) == 1:
        return check_section(given, key.sections[0], prefix, is_open=key.is_open)

    sections = {keys(section)["name"].default: section for section in key.sections}
    if given.get("name") not in sections:
        raise _no_choice(f"{prefix}name", given.get("name"), sections)
    checked = check_section(given, sections[given["name"]], prefix)
    return {name: inner for name, inner in checked.items() if inner is not None}


def _check_bounds(value: Any, converted: Any, key: Key) -> None:
    """Raise ConfigError for a number outside the bounds of its key.

    Args:
        value: the given value, for messages.
        converted: the value in the type of its key.
        key: the key.
    """
    if converted == "auto":
        return

    bounds = (
        (key.minimum, operator.ge, "at least", f"{key.minimum} or more"),
        (key.above, operator.gt, "above", "null for no limit"),
        (key.maximum, operator.le, "at most", f"{key.maximum} or less"),
    )
    for bound, is_kept, comparison, example in bounds:
        if bound is not None and not is_kept(converted, bound):
            raise ConfigError(
                f"`{key.name}` is {value}, but must be {comparison} {bound} ({key.doc}).",
                hint=f"Use {key.name}={example}.",
            )


def _converted(name: str, value: Any, types: tuple[Any, ...]) -> Any:
    """Return `value` in the first of `types` that fits; None if no type fits.

    Raises:
        ConfigError: the only type is a Literal and does not fit, or an inner value is wrong.
    """
    for kind in types:
        converted = _as(kind, value, name)
        if converted is not None:
            return converted
        if get_origin(kind) is Literal and len(types) == 1:
            raise _no_choice(name, value, get_args(kind))

    return None


def _as(kind: Any, value: Any, name: str) -> Any:
    """Return `value` in the type `kind` of the schema; None if the value does not fit.

    Raises:
        ConfigError: an inner value of a list or mapping is wrong.
    """
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
        return _as_nodes(value, name)
    if get_origin(kind) is Literal:
        # Compare the value as a text, because YAML and Hydra read `precision=32` as a number.
        text = _as_text(value)
        if text not in get_args(kind):
            return None
        return text
    if get_origin(kind) is tuple:
        return _as_lines(value, name)
    if get_args(kind)[1] is str:
        return _as_variables(value, name)
    return _as_options(value, name)


def _as_text(value: Any) -> str | None:
    """Return a text unless it is blank, and a whole number as text; None for any other value."""
    if _is_int(value):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    return None


def _as_whole(value: Any) -> int | None:
    """Return a whole number, also given as 3.0; None for any other value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if _is_int(value) else None


def _as_number(value: Any) -> float | int | None:
    """Return a finite number; None for any other value."""
    is_number = _is_int(value) or isinstance(value, float)
    return value if is_number and math.isfinite(value) else None


def _is_int(value: Any) -> bool:
    """Return whether a value is an int, but not a bool, which is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _as_flag(value: Any) -> bool | None:
    """Return a bool, also for the texts `on` and `off`; None for any other value.

    YAML reads `on` and `off` as bools, but Hydra's command line leaves them as texts.
    """
    if isinstance(value, str):
        return {"on": True, "off": False}.get(value)
    return value if isinstance(value, bool) else None


def _as_mapping(value: Any) -> dict[str, Any] | None:
    """Return a copy of a mapping whose keys are texts; None for any other value."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    return None


def _as_nodes(value: Any, name: str) -> dict[str, Any] | None:
    """Return a mapping of names to mappings; None if `value` is no mapping.

    Raises:
        ConfigError: a name is not an identifier, or an inner value is no mapping.
    """
    nodes = _as_mapping(value)
    for key, node in (nodes or {}).items():
        _check_name(key, name)
        if _as_mapping(node) is None:
            raise _wrong(f"{name}.{key}", node, (TargetNode,), f"an entry of `{name}`")

    return nodes


def _check_name(key: str, name: str) -> None:
    """Raise ConfigError unless `key`, a name below the key `name`, is an identifier."""
    if not _VARIABLE.fullmatch(key):
        raise ConfigError(
            f"`{name}` has an entry with the invalid name {key!r}.",
            hint="A name holds letters, digits and underscores, and does not begin with a digit.",
        )


def _as_lines(value: Any, name: str) -> list[str] | None:
    """Return a list of texts, also for a single text; None for any other value.

    Raises:
        ConfigError: an item is not a text, or holds a NUL character.
    """
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)):
        return None

    for index, line in enumerate(lines):
        if not isinstance(line, str) or "\0" in line:
            raise _wrong(f"{name}[{index}]", line, _SHELL_LINE, "it runs before the training")
    return list(lines)


def _as_variables(value: Any, name: str) -> dict[str, str] | None:
    """Return environment variables by name, numbers as texts; None if `value` is no mapping.

    Raises:
        ConfigError: a name is not an identifier, or a value is neither a text nor a number.
    """
    variables = _as_mapping(value)
    if variables is None:
        return None

    for key, variable in variables.items():
        _check_name(key, name)
        if not isinstance(variable, (str, int, float)) or isinstance(variable, bool):
            raise _wrong(f"{name}.{key}", variable, _TEXT, "an environment variable")
    return {key: str(variable) for key, variable in variables.items()}


def _as_options(value: Any, name: str) -> dict[str, Any] | None:
    """Return options of sbatch or srun by name, without options that are null; None if `value` is no mapping.

    Raises:
        ConfigError: an option is empty, of another type, or holds a control character.
    """
    mapping = _as_mapping(value)
    if mapping is None:
        return None

    options = {key: option for key, option in mapping.items() if option is not None}
    for key, option in options.items():
        if not isinstance(option, (str, int)):
            raise _wrong(f"{name}.{key}", option, _OPTION, "an option")
        if isinstance(option, str) and _CONTROL.search(option):
            raise _with_control(f"{name}.{key}", option)
        if option == "":
            raise ConfigError(
                f"`{name}.{key}` is empty, but SLURM refuses an option without its value.",
                hint="Give a value, true for an option that takes none, or null to leave the option out.",
            )

    return options


def _missing(key: Key) -> ConfigError:
    """Return the error for a key that has no default and no value."""
    expected, _ = _EXPECTED.get(key.types, _SECTION)
    return ConfigError(f"`{key.name}` is missing: {key.doc}.", hint=f"Give it {expected}.")


def _no_choice(name: str, value: Any, choices: Any) -> ConfigError:
    """Return the error for a value that is not one of the allowed texts `choices`."""
    near = near_matches(str(value), choices, else_all=False)
    return ConfigError(f"`{name}` can't be {value!r}; it is one of {', '.join(choices)}.", hint=near)


def _with_control(name: str, value: str) -> ConfigError:
    """Return the error for a text with a control character."""
    return ConfigError(
        f"`{name}` is {value!r}, which holds a line break or another control character.",
        hint="Write it on one line, in printable characters.",
    )


def _wrong(name: str, value: Any, expected: tuple[Any, ...] | str, doc: str) -> ConfigError:
    """Return the error for a value that has none of the types of its key.

    Args:
        name: the full name of the key.
        value: the value.
        expected: the types of the key, or the name of a right value for the message.
        doc: the meaning of the key.
    """
    example = ""
    if isinstance(expected, str):
        kind = expected
    else:
        kind, example = _EXPECTED.get(expected, _SECTION)

    given = "empty"
    if value not in (None, ""):
        given = f"{shorten(repr(value), 80)} ({_kind_of(value)})"

    hint = "`slurmddp train --cfg` shows the keys of a configuration."
    if example:
        hint = f"For example {name}={example}."
    elif expected in (_TEXT, _SHELL_LINE, _OPTION, (str,)):
        hint = f"Quote it if it should be a text: '{name}=\"...\"'."
    return ConfigError(f"`{name}` is {given}, but must be {kind} ({doc}).", hint=hint)


def _kind_of(value: Any) -> str:
    """Return the type of a value in the terms of YAML, such as "a mapping"."""
    if isinstance(value, Mapping):
        return "a mapping"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), type(value).__name__)
