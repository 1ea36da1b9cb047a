"""Select the keys that decide a run's name, that identify a checkpoint, and that a program reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.settings.keys import TOP, every_key
from slurmddp.settings.schema import Identity
from slurmddp.settings.spec import RUN_DIGITS


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the `RUN_DIGITS` hex digits at the end of a run's name: a hash of `named(config)`."""
    return hashlib.sha256(_text(named(config)).encode()).hexdigest()[:RUN_DIGITS]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in nested mappings; an empty mapping counts as a value.

    A number as a key, as in `labels: {1: cat}`, is written `labels[1]`, because `labels.1` would be the text
    "1" as a key.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            part = f".{key}" if isinstance(key, str) else f"[{key}]"
            yield from leaves(inner, (prefix + part).removeprefix("."))
    elif prefix:
        yield prefix, value


def shown(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as JSON for a message; `not set` for a missing key."""
    return json.dumps(values[key], default=str) if key in values else "not set"


def named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that decides a run's name: the keys COMPUTED and EXTENT."""
    return part_of(config, Identity.COMPUTED, Identity.EXTENT)


def _text(value: Mapping[str, Any]) -> str:
    """Return the text whose hash ends a run's name.

    A later version must return the same text, or commands would no longer find stored runs by their names.
    """
    return json.dumps(_sorted(value), separators=(",", ":"), default=str)


def _sorted(value: Any) -> Any:
    """Return a value in which the keys of all mappings are sorted, numbers before texts."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=_place)}
    if isinstance(value, (list, tuple)):
        return [_sorted(inner) for inner in value]
    return value


def _place(key: Any) -> tuple[bool, float, str]:
    """Return the sort key of a mapping's key, by which numbers precede texts."""
    is_number = isinstance(key, (int, float))
    number = key if is_number else 0
    return not is_number, number, str(key)


def part_of(config: Mapping[str, Any], *identities: Identity) -> dict[str, Any]:
    """Return the part of a configuration whose keys have one of the `identities`.

    Keys that the program never gets are left out, and keys of later versions with their default value. A key
    that the schema does not list counts as COMPUTED, because it is an argument of the user's code.
    """
    known = every_key()

    def is_part(name: str, value: Any) -> bool:
        if name not in known:
            return Identity.COMPUTED in identities

        key = known[name]
        if key.later and value in (key.default, None):
            return False
        return key.identity in identities

    part: dict[str, Any] = {}
    for name, value in relevant(config).items():
        if name not in TOP or not is_part(name, value):
            continue
        if isinstance(value, Mapping):
            value = {key: inner for key, inner in value.items() if is_part(f"{name}.{key}", inner)}
        part[name] = value

    return part


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that its program never gets.

    A script, module or command gets no key that only slurmddp's trainer reads.
    """
    program = config.get("program")
    has_script = isinstance(program, Mapping) and program.get("script")
    return {
        name: value
        for name, value in config.items()
        if not (has_script and name in TOP and TOP[name].trainer)
    }
