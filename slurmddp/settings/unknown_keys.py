"""Refuse keys that do not exist, and name the key that was probably meant.

`config/checks/signatures.py` refuses arguments that a class or function does not take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches, nearest
from slurmddp.settings.keys import OPEN_NODES, Key, every_key

_SBATCH_OPTIONS = frozenset(
    {"begin", "comment", "contiguous", "deadline", "dependency", "exclude", "exclusive", "hold", "licenses"}
    | {"mail-type", "mail-user", "nice", "nodelist", "priority", "switches", "tmp", "wckey"}
)
"""Options of sbatch that people type as keys; `sbatch:` of a cluster takes every other option too."""


def refuse_misplaced(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown key whose last part is a key of another section.

    For `lr=1` and `train.lr=1`, the message suggests `optimizer.lr`.
    """
    sections = {name: value for name, value in config.items() if isinstance(value, Mapping)}
    known = {*every_key(), *(f"{node}.{key}" for node in OPEN_NODES for key in sections.get(node, ()))}
    closed = {"": config, **{f"{name}.": sections.get(name, {}) for name in ("train", "policy")}}
    names = [f"{prefix}{key}" for prefix, given in closed.items() for key in given]

    for name in names:
        if name in known:
            continue
        last = name.rpartition(".")[2]
        meant = sorted(key for key in known if key.rpartition(".")[2] == last)
        if meant:
            raise ConfigError(
                f"`{name}` is not a key of the configuration.", hint=f"Did you mean {' or '.join(meant)}?"
            )


def unknown_key(name: str, known: Mapping[str, Key], prefix: str) -> ConfigError:
    """Return the error for a key that the schema does not have.

    Args:
        name: the key without its section.
        known: the keys of the section by name.
        prefix: the section and a dot; empty for a top key.
    """
    option = name.replace("_", "-")
    if prefix in ("", "cluster.") and option in _SBATCH_OPTIONS:
        return ConfigError(
            f"`{prefix}{name}` is not a key of the configuration, but an option of sbatch.",
            hint=f"Write +cluster.sbatch.{option}=VALUE, or put it under `sbatch:` in the cluster file.",
        )

    hint = near_matches(name, known, prefix=prefix)
    if not nearest(name, known):
        hint += " Arguments of your own code go beside its `_target_`: model.x=..., program.x=..."
        if not prefix:
            hint += f" A key of your own is allowed here if another value refers to it: ${{{name}}}."
    return ConfigError(f"`{prefix}{name}` is not a key of the configuration.", hint=hint)


def unknown_in_file(node: str, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a typed setting `NODE.NAME` whose node, as composed from its files, lacks the key.

    Args:
        node: the node, such as `model`.
        name: the key in the node.
        known: the keys that the node has.
    """
    near = near_matches(name, known, prefix=f"{node}.")
    return ConfigError(
        f"`{node}` has no key {name!r}.",
        hint=f"{near} To pass it to the code all the same, write +{node}.{name}=...".strip(),
    )
