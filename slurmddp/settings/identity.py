"""Select the keys that decide a run's name, a checkpoint's identity, and the input of a program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.settings.keys import TOP, every_key
from slurmddp.settings.schema import Identity
from slurmddp.settings.spec import RUN_DIGITS


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the hex digits of a run's name: a hash of the computation and its extent."""
    return hashlib.sha256(_text(named(config)).encode()).hexdigest()[:RUN_DIGITS]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty mapping counts as a value.

    YAML has keys that are no text, such as the 1 of `{1: cat}`: `labels[1]` is not `labels.1`.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            part = f".{key}" if isinstance(key, str) else f"[{key}]"
            yield from leaves(inner, (prefix + part).removeprefix("."))
    elif prefix:
        yield prefix, value


def shown(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key for a message."""
    return json.dumps(values[key], default=str) if key in values else "not set"


def named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that decide a run's name."""
    return part_of(config, Identity.COMPUTED, Identity.EXTENT)


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(_sorted(value), separators=(",", ":"), default=str)


def _sorted(value: Any) -> Any:
    """Return a value with the keys of its mappings in order: numbers before texts."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=_place)}
    if isinstance(value, (list, tuple)):
        return [_sorted(inner) for inner in value]
    return value


def _place(key: Any) -> tuple[bool, float, str]:
    is_number = isinstance(key, (int, float))
    return not is_number, key if is_number else 0, str(key)


def part_of(config: Mapping[str, Any], *identities: Identity) -> dict[str, Any]:
    """Return the keys that the program sees and that have one of the `identities`.

    A key that the schema does not know belongs to the user's code, and so to the computation.
    """
    known = every_key()

    def is_part(name: str, value: Any) -> bool:
        if name not in known:
            return Identity.COMPUTED in identities
        key = known[name]
        return key.identity in identities and not (key.later and value in (key.default, None))

    return {
        name: {inner: one for inner, one in value.items() if is_part(f"{name}.{inner}", one)}
        if isinstance(value, Mapping)
        else value
        for name, value in relevant(config).items()
        if name in TOP and is_part(name, value)
    }


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that the program never sees."""
    program = config.get("program")
    has_script = isinstance(program, Mapping) and program.get("script")
    return {
        name: value
        for name, value in config.items()
        if not (has_script and name in TOP and TOP[name].trainer)
    }
