"""The settings of runs, flat and by full name, and the settings in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.arguments import call_of
from slurmddp.settings.identity import relevant
from slurmddp.settings.spec import FUNCTION_CALL


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """Return the settings of a run for readers, by full names (`optimizer.lr`), without its name.

    Raises:
        SlurmddpError: the configuration can't be read.
    """
    config = config_secrets.for_readers(relevant(folder.config()))
    program = config.get("program") or {}
    if program.get("script") == FUNCTION_CALL and (call := call_of(program.get("args") or ())):
        others = {key: value for key, value in program.items() if key not in ("script", "args")}
        config = {**config, "program": {"call": call, **others}}
    return {key: value for key, value in _flat(config) if key != "name"}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_that_differ(*runs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which runs differ: the value of each run by full name; a missing one is None."""
    names = dict.fromkeys(key for settings in runs for key in settings)
    values = {key: tuple(settings.get(key) for settings in runs) for key in names}
    return {key: found for key, found in values.items() if any(one != found[0] for one in found)}


def as_text(value: Any) -> str:
    """Return the value of a setting for a table; `-` if a run does not have it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
