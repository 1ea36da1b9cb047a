"""Compare the configuration of a checkpoint with the configuration of the run, key by key."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.errors import ConfigError
from slurmddp.runs.folder.config_secrets import without_environment
from slurmddp.settings.identity import leaves, part_of, shown
from slurmddp.settings.schema import Identity
from slurmddp.short_text import first_items

_SHOWN = 10

log = logging.getLogger(__name__)


def bound_to(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's configuration whose keys change the numbers that the run computes."""
    return part_of(without_environment(config, digests=True), Identity.COMPUTED)


def manifest_facts(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the manifest entries "config_hash" and "config" for a configuration; empty if it is None."""
    if config is None:
        return {}

    plain = _plain(config)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return {"config_hash": hashlib.sha256(text.encode()).hexdigest()[:16], "config": plain}


def check(meta: Mapping[str, Any], config: Mapping[str, Any] | None, name: str, *, allow: bool) -> None:
    """Compare the configuration in a checkpoint's manifest with the configuration of the run.

    Nothing is compared if the manifest contains no configuration, or `config` is None.

    Args:
        meta: the metadata in the manifest.
        config: the configuration of the run.
        name: the name of the checkpoint, for the message.
        allow: whether a difference is only logged as a warning.

    Raises:
        ConfigError: a key differs, and `allow` is False.
    """
    facts = manifest_facts(config)
    saved = meta.get("config")
    if not facts or not isinstance(saved, Mapping) or meta.get("config_hash") == facts["config_hash"]:
        return
    lines = differences(saved, facts["config"])
    if not lines:
        return

    shown = first_items(lines, _SHOWN, separator="\n  ", rest="\n  and {} more")
    keys = "one key differs" if len(lines) == 1 else f"{len(lines)} keys differ"
    message = f"Checkpoint {name} was written with another configuration; {keys}:\n  {shown}"
    if allow:
        log.warning("%s\nIt is loaded nevertheless, because another configuration is allowed.", message)
        return

    raise ConfigError(
        message,
        hint="Use the checkpoint's values, or start a run with another name. To resume with the new values, "
        f"set {ALLOW_OTHER_CONFIG_VARIABLE}=1 or call load(..., allow_other_config=True).",
    )


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return one line for each key whose values differ: `optimizer.lr: 0.1 in the checkpoint, 0.2 here`."""
    before = dict(leaves(saved))
    now = dict(leaves(given))
    return [
        f"{key}: {shown(before, key)} in the checkpoint, {shown(now, key)} here"
        for key in sorted(before.keys() | now.keys())
        if shown(before, key) != shown(now, key)
    ]


def _plain(value: Any) -> Any:
    """Return `value` as JSON values: keys, NaN, infinities and unknown types become strings, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    is_number = isinstance(value, float) and value - value == 0  # neither infinite nor NaN
    return value if is_number else str(value)
