"""Collect the settings of runs by their full names, and find the settings in which runs differ."""

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
    """Return the settings of a run for a report, except for `name`; the keys are full names (`optimizer.lr`).

    Values from environment variables and of `cluster.env` are hidden.

    Raises:
        SlurmddpError: the configuration can't be read.
    """
    config = config_secrets.for_readers(relevant(folder.config()))
    program = config.get("program") or {}
    call: str | None = None
    if program.get("script") == FUNCTION_CALL:
        call = call_of(program.get("args") or ())

    # The arguments of a function call are JSON, so the report shows the call as Python code instead.
    if call:
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
    """Return the settings that differ between runs: by full name, the values of all runs in their order.

    The value of a run that lacks the setting is None.
    """
    names = dict.fromkeys(key for settings in runs for key in settings)
    values = {name: tuple(settings.get(name) for settings in runs) for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def as_text(value: Any) -> str:
    """Return the value of a setting as text for a table: JSON, or the text itself; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
