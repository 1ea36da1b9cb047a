"""Convert the results of actions to JSON and back, for `--json` and for calls over ssh.

A result is a frozen dataclass of plain values, paths and other such dataclasses. Its JSON document has a key
for each field, and the key `version`. NaN and infinity become null, because JSON has neither.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

VERSION = 1
"""Version of the documents. It grows if a key is removed or changes its meaning, not if a key is added."""

T = TypeVar("T")


def to_json(result: Any) -> dict[str, Any]:
    """Convert a result to its JSON document: a dictionary of plain values with the key `version`.

    Args:
        result: an instance of a dataclass.

    Example:
        json.dumps(to_json(status("gpt")), allow_nan=False)
    """
    return {"version": VERSION, **json_value(result)}


def from_json(kind: type[T], document: Mapping[str, Any], host: str = "") -> T:
    """Convert a JSON document back to the result from which `to_json` made it. Unknown keys are ignored.

    Args:
        kind: the dataclass of the result.
        document: a document that `to_json` returned.
        host: the host that wrote the document; its paths become HOST:PATH. Empty: this machine.

    Raises:
        ValueError: a key is missing, or its value has another type.
    """
    value: T = _read(kind, document, getattr(kind, "__name__", str(kind)), host)
    return value


def json_value(value: Any) -> Any:
    """Convert a value to JSON.

    A dataclass becomes a dictionary, a tuple a list, NaN and infinity null. Any other value without a JSON
    type, such as a path, becomes text.
    """
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


@cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any, place: str, host: str) -> Any:
    """Convert a JSON value to a Python value of the type `kind`.

    Args:
        kind: the type, as it is written in an annotation.
        value: the JSON value.
        place: the keys that lead to the value, such as `Stopped.runs`, for errors.
        host: the host to which paths belong; empty: this machine.

    Raises:
        ValueError: the value does not fit the type.
    """
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _read_union(kind, value, place, host)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, place, host)
    if origin is typing.Literal:
        _require(value in typing.get_args(kind), value, place)
        return value
    if origin is tuple or origin is list or origin is Sequence:
        _require(isinstance(value, list), value, place)
        items = [_read(typing.get_args(kind)[0], item, place, host) for item in value]
        return items if origin is list else tuple(items)
    if origin is dict or origin is Mapping:
        _require(isinstance(value, dict), value, place)
        item_kind = typing.get_args(kind)[1]
        return {key: _read(item_kind, item, f"{place}.{key}", host) for key, item in value.items()}
    if kind is Path:
        _require(isinstance(value, str), value, place)
        return Path(f"{host}:{value}" if host else value)
    if kind is float:
        if value is None:
            return math.nan
        _require(isinstance(value, (int, float)) and not isinstance(value, bool), value, place)
        return float(value)

    _require(type(value) is kind, value, place)
    return value


def _read_union(kind: Any, value: Any, place: str, host: str) -> Any:
    """Convert a JSON value to the first type of a union that it fits; null to None.

    Raises:
        ValueError: the value fits none of the types.
    """
    kinds = typing.get_args(kind)
    if value is None and type(None) in kinds:
        return None

    *options, last = [option for option in kinds if option is not type(None)]
    for option in options:
        with suppress(ValueError):
            return _read(option, value, place, host)

    return _read(last, value, place, host)


def _read_dataclass(kind: Any, value: Any, place: str, host: str) -> Any:
    """Convert a dictionary to an instance of a dataclass; fields without a key get their defaults.

    Raises:
        ValueError: the value is no dictionary, lacks a key without a default, or has values of other types.
    """
    _require(isinstance(value, dict), value, place)
    values = {}
    for field in fields(kind):
        if field.name in value:
            name = f"{place}.{field.name}"
            values[field.name] = _read(_types(kind)[field.name], value[field.name], name, host)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{place} has no key {field.name!r}")

    return kind(**values)


def _require(is_right: bool, value: Any, place: str) -> None:
    """Raise a ValueError that names the place and the value, unless `is_right`."""
    if not is_right:
        raise ValueError(f"{place} is {value!r}")
