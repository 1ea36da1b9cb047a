"""What one value of a configuration may be, and how a wrong one is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import ConfigError, near_matches


@dataclass(frozen=True)
class Field:
    """One key: what it holds, its bounds, and what it is for."""

    kind: str
    doc: str
    minimum: float | None = None
    optional: bool = False
    choices: tuple[str, ...] = ()
    maximum: float | None = None
    above: float | None = None
    """Bound of an optional number, which must be larger; null switches off what it limits."""


EXPECTED = {
    "text": "a text",
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false (or on, off)",
    "interval": "auto or a whole number",
    "time": 'a time such as "HH:MM:SS", "90m" or a number of minutes',
    "node": "a mapping with a `_target_`",
    "section": "a mapping of keys to values",
    "lines": "a list of shell lines",
    "texts": "a mapping of names to texts",
    "flags": "a mapping of options to texts, numbers or true",
    "line": "a shell line",
    "variable": "a text",
    "option": "a text, a number or true",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_value(key: str, value: Any, field: Field) -> Any:
    """Return one value in its own type; raises ConfigError when it can't be what the key needs."""
    if value is None:
        if field.optional:
            return None
        raise _wrong(key, value, field)
    several = field.kind in ("lines", "texts", "flags")
    converted = _check_entries(key, value, field.kind) if several else _CONVERT[field.kind](value)
    if converted is None:
        raise _wrong(key, value, field)
    if field.kind == "text" and _CONTROL.search(converted):
        raise _with_control(key, value)
    if field.choices and converted not in field.choices:
        near = near_matches(converted, field.choices, else_all=False)
        raise ConfigError(f"`{key}` can't be {value!r}; it is one of {', '.join(field.choices)}.", hint=near)
    if field.minimum is not None and converted != "auto" and not converted >= field.minimum:
        raise ConfigError(
            f"`{key}` is {value}, but must be at least {field.minimum:g} ({field.doc}).",
            hint=f"Say {key}={field.minimum:g} or more.",
        )
    if field.above is not None and not converted > field.above:
        raise ConfigError(
            f"`{key}` is {value}, but must be above {field.above:g} ({field.doc}).",
            hint=f"Say {key}=null for no limit.",
        )
    if field.maximum is not None and not converted <= field.maximum:
        raise ConfigError(
            f"`{key}` is {value}, but must be at most {field.maximum} ({field.doc}).",
            hint=f"Say {key}={field.maximum} or less.",
        )
    return converted


def _with_control(key: str, value: str) -> ConfigError:
    return ConfigError(
        f"`{key}` is {value!r}, which holds a line break or another control character.",
        hint="Give it in one line of plain characters.",
    )


def _wrong(key: str, value: Any, field: Field) -> ConfigError:
    given = "empty" if value in (None, "") else f"{_shortened(value)} ({_kind_of(value)})"
    return ConfigError(
        f"`{key}` is {given}, but must be {EXPECTED[field.kind]} ({field.doc}).",
        hint=_how_to_give(key, field),
    )


def _how_to_give(key: str, field: Field) -> str:
    if field.kind in ("text", "line", "variable", "option"):
        return f"Quote it if it should be a text: '{key}=\"...\"'."
    examples = {"whole": "1", "number": "1.5", "flag": "true", "time": "02:00:00", "interval": "auto"}
    if field.kind in examples:
        return f"For example {key}={examples[field.kind]}."
    return "See `slurmddp train --cfg` for the shape."


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "a mapping" if isinstance(value, Mapping) else type(value).__name__)


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
    """Return a flag; a command line's `on` and `off` come as texts, where YAML reads them as flags itself."""
    if isinstance(value, str):
        return {"on": True, "off": False}.get(value)
    return value if isinstance(value, bool) else None


def _as_interval(value: Any) -> str | int | None:
    return "auto" if value == "auto" else _as_whole(value)


def _as_time(value: Any) -> str | int | None:
    return _as_text(value) if isinstance(value, str) else _as_whole(value)


def _as_mapping(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) else None


def _check_entries(key: str, value: Any, kind: str) -> Any:
    """Return a list or mapping with each entry in its own type; None where `value` is neither."""
    if kind == "lines":
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, list):
            return None
        return [_entry(f"{key}[{index}]", line, _LINE) for index, line in enumerate(lines)]
    mapping = _as_mapping(value)
    if mapping is None:
        return None
    if kind == "flags":
        given = {name: inner for name, inner in mapping.items() if inner is not None}
        return {name: _entry(f"{key}.{name}", inner, _FLAG) for name, inner in given.items()}
    for name in mapping:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"`{key}` has the name {name!r}.", hint="Names hold letters, digits and underscores."
            )
    return {name: _entry(f"{key}.{name}", inner, _VARIABLE) for name, inner in mapping.items()}


def _entry(key: str, value: Any, field: Field) -> Any:
    converted = _CONVERT[field.kind](value)
    if converted is None:
        raise _wrong(key, value, field)
    if field is _FLAG and isinstance(value, str) and _CONTROL.search(value):
        raise _with_control(key, value)
    return converted


def _as_line(value: Any) -> str | None:
    return value if isinstance(value, str) and "\0" not in value else None


def _as_variable(value: Any) -> str | None:
    right = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return str(value) if right else None


def _as_option(value: Any) -> str | int | bool | None:
    return value if isinstance(value, (str, int, bool)) else None


_LINE = Field("line", "it runs before the training")
_FLAG = Field("option", "an option")
_VARIABLE = Field("variable", "an environment variable")

_CONVERT: dict[str, Callable[[Any], Any]] = {
    "text": _as_text,
    "whole": _as_whole,
    "number": _as_number,
    "flag": _as_flag,
    "interval": _as_interval,
    "time": _as_time,
    "node": _as_mapping,
    "section": _as_mapping,
    "line": _as_line,
    "variable": _as_variable,
    "option": _as_option,
}
