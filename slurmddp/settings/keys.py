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
    """The full name, such as `train.steps`."""
    types: tuple[Any, ...]
    """The types that a value may have, without None."""
    optional: bool
    """Whether a value may be null."""
    default: Any
    """The default value; MISSING for a section and for a group."""
    doc: str
    identity: Identity
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """A bound that a number must exceed; null then means no limit."""
    later: bool = False
    """Whether runs of earlier versions may lack the key; its default and null are no part of an identity."""
    trainer: bool = False
    """Whether only slurmddp's trainer reads the key; a script never gets its value."""
    is_open: bool = False
    """Whether a section may hold keys that the schema does not list."""
    is_group: bool = False
    """Whether the choices of the key are files of a folder in `conf/`."""
    choice: str | None = None
    """The file that a group chooses by default."""

    @property
    def shown_default(self) -> str:
        """The default as YAML writes it, or all choices; empty for null, a section and a list."""
        if get_origin(self.types[-1]) is Literal and len(self.types) == 1:
            return " | ".join(get_args(self.types[0]))

        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, (int, float, str)):
            return str(self.default)
        return self.choice or ""

    @property
    def sections(self) -> tuple[type, ...]:
        """The dataclasses of the keys below this key; a strategy has several, of which `name` chooses."""
        return tuple(kind for kind in self.types if isinstance(kind, type) and is_dataclass(kind))


@functools.cache
def keys(section: type, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a dataclass in the order of its fields; `prefix` is put before their names."""
    return {field.name: _key_of(field, prefix) for field in fields(section)}


def _key_of(field: Field[Any], prefix: str) -> Key:
    """Return the key that a field describes."""
    alternatives: tuple[Any, ...] = (field.type,)
    if get_origin(field.type) in (Union, UnionType):
        alternatives = get_args(field.type)

    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    # OmegaConf 2.4 has a type of its own for tuples, which takes no text in place of a list.
    if isinstance(default, tuple):
        default = list(default)

    return Key(
        name=prefix + field.name,
        types=tuple(kind for kind in alternatives if kind is not NoneType),
        optional=NoneType in alternatives,
        default=default,
        **field.metadata,
    )


TOP = keys(Config)
"""The keys of the top level by name."""
GROUPS = {name: key.choice for name, key in TOP.items() if key.is_group}
"""The default choice of each group."""
OPEN_NODES = tuple(name for name, key in TOP.items() if key.is_open or TargetNode in key.types)
"""Keys that build an object from `_target_`; the keys beside `_target_` are arguments."""
NAMED_NODES = tuple(name for name, key in TOP.items() if NamedTargetNodes in key.types)
"""Keys that build several objects, each from a `_target_` below its name."""


@functools.cache
def every_key() -> dict[str, Key]:
    """Return all keys by their full names: top keys first, then the keys of each section."""
    by_name = {key.name: key for key in TOP.values()}
    for outer in TOP.values():
        for section in outer.sections:
            for key in keys(section, f"{outer.name}.").values():
                # A section's identity holds for all its keys, unless it leaves the decision to each key.
                if outer.identity is not COMPUTED:
                    key = replace(key, identity=outer.identity)
                by_name.setdefault(key.name, key)

    return by_name


def defaults() -> dict[str, Any]:
    """Return the default values of all keys except groups."""
    values = {name: key.default for name, key in TOP.items() if key.default is not MISSING}
    for name, key in TOP.items():
        if key.sections and not key.is_group:
            inner_keys = keys(key.sections[0])
            values[name] = {inner_name: inner.default for inner_name, inner in inner_keys.items()}

    return values
