"""Describe the keys of the configuration, by name and by section, from the fields of `settings/schema.py`."""

from __future__ import annotations

import functools
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from slurmddp.settings.schema import COMPUTED, Config, Identity, NamedTargetNodes, TargetNode


@dataclass(frozen=True, kw_only=True)
class Key:
    """The description of one key of the configuration, read from a field of the schema."""

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
    """A bound that a number must exceed. Such a key may be null, which means no limit."""
    later: bool = False
    """Whether stored runs of earlier versions may lack the key.

    Its default and null are left out of the hash in a run's name, so that these runs keep their names.
    """
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
        """The default for the help: as YAML writes it, all choices of a Literal, or the file of a group.

        Empty if the default is null, a list or a section.
        """
        if get_origin(self.types[-1]) is Literal and len(self.types) == 1:
            return " | ".join(get_args(self.types[0]))

        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, (int, float, str)):
            return str(self.default)
        return self.choice or ""

    @property
    def sections(self) -> tuple[type, ...]:
        """The dataclasses that describe the keys below this key; empty if it holds a plain value.

        `strategy` has several dataclasses, of which its key `name` selects one.
        """
        return tuple(kind for kind in self.types if isinstance(kind, type) and is_dataclass(kind))


@functools.cache
def keys(section: type, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a dataclass by the names of its fields, in their order.

    Args:
        section: the dataclass.
        prefix: the beginning of the full name of each key, such as `train.`.
    """
    return {field.name: _key_of(field, prefix) for field in fields(section)}


def _key_of(field: Field[Any], prefix: str) -> Key:
    """Return the key that a field describes."""
    alternatives: tuple[Any, ...] = (field.type,)
    if get_origin(field.type) in (Union, UnionType):
        alternatives = get_args(field.type)

    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    # OmegaConf 2.4 would store a tuple as a type that accepts no text, but a key such as `args` takes both.
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
"""The default choice of each group, by the name of the group."""
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
                # COMPUTED is the default identity of a section. Any other identity applies to all keys of the
                # section.
                if outer.identity is not COMPUTED:
                    key = replace(key, identity=outer.identity)
                by_name.setdefault(key.name, key)

    return by_name


def defaults() -> dict[str, Any]:
    """Return the default values of all keys except groups, as nested mappings."""
    values = {name: key.default for name, key in TOP.items() if key.default is not MISSING}
    for name, key in TOP.items():
        if key.sections and not key.is_group:
            inner_keys = keys(key.sections[0])
            values[name] = {inner_name: inner.default for inner_name, inner in inner_keys.items()}

    return values
