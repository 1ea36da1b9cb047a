"""Read the keys of the configuration from the fields of `settings/schema.py`, by name and by section."""

from __future__ import annotations

import functools
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from slurmddp.settings.schema import COMPUTED, Config, Identity, NamedTargetNodes, TargetNode


@dataclass(frozen=True, kw_only=True)
class Key:
    """The description of one key, read from its field."""

    name: str
    """The full name: `train.steps`."""
    types: tuple[Any, ...]
    """The types of a value, without None."""
    optional: bool
    """Whether null is a value."""
    default: Any
    """MISSING for a section and for a group."""
    doc: str
    identity: Identity
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """A bound that a value must exceed; null means no limit."""
    later: bool = False
    """Whether stored runs may lack the key: its default, or null, is no part of an identity."""
    trainer: bool = False
    """Whether only slurmddp's trainer reads the key; a script never sees it."""
    is_open: bool = False
    """Whether other keys may stand beside the keys of the section."""
    is_group: bool = False
    choice: str | None = None
    """The default choice of a group."""

    @property
    def shown_default(self) -> str:
        """The default as YAML writes it, or all choices; empty for null, a section and a list."""
        if get_origin(self.types[-1]) is Literal and len(self.types) == 1:
            return " | ".join(get_args(self.types[0]))
        if isinstance(self.default, bool):
            return str(self.default).lower()
        is_plain = isinstance(self.default, (int, float, str))
        return str(self.default) if is_plain else self.choice or ""

    @property
    def sections(self) -> tuple[type, ...]:
        """The dataclasses that may describe the keys below this key."""
        return tuple(one for one in self.types if isinstance(one, type) and is_dataclass(one))


@functools.cache
def keys(section: type, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a dataclass in the order of its fields; `prefix` is put before their names."""
    return {one.name: _key_of(one, prefix) for one in fields(section)}


def _key_of(one: Field[Any], prefix: str) -> Key:
    alternatives = get_args(one.type) if get_origin(one.type) in (Union, UnionType) else (one.type,)
    return Key(
        name=prefix + one.name,
        types=tuple(kind for kind in alternatives if kind is not NoneType),
        optional=NoneType in alternatives,
        default=one.default if one.default_factory is MISSING else one.default_factory(),
        **one.metadata,
    )


TOP = keys(Config)
GROUPS = {name: one.choice for name, one in TOP.items() if one.is_group}
OPEN_NODES = tuple(name for name, one in TOP.items() if one.is_open or TargetNode in one.types)
"""Keys that build the user's code: any key may stand beside `_target_`."""
NAMED_NODES = tuple(name for name, one in TOP.items() if NamedTargetNodes in one.types)
"""Keys that build several objects of the user's code, by name."""


@functools.cache
def every_key() -> dict[str, Key]:
    """Return all keys by their full names: top keys first, then the keys of each section."""
    found = {one.name: one for one in TOP.values()}
    for outer in TOP.values():
        for kind in outer.sections:
            for one in keys(kind, f"{outer.name}.").values():
                is_own = outer.identity is COMPUTED
                found.setdefault(one.name, one if is_own else replace(one, identity=outer.identity))
    return found


def defaults() -> dict[str, Any]:
    """Return the default values of all keys except groups."""
    plain = {name: one.default for name, one in TOP.items() if one.default is not MISSING}
    inner = {name: keys(one.sections[0]) for name, one in TOP.items() if one.sections and not one.is_group}
    return plain | {name: {key: one.default for key, one in table.items()} for name, table in inner.items()}
