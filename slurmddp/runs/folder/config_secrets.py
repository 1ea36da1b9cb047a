"""Keep values of the environment, which may be secrets, out of reports and checkpoints.

A run needs the values of its submission, so its private `config.yaml` holds them. `config.yaml` also holds
the expressions of these values (`${oc.env:TOKEN}`). Reports and checkpoints show the expressions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

EXPRESSIONS = "from_environment"
"""Key of `config.yaml` that holds the expressions with `oc.env`, each under the key of its value."""
NOT_SHOWN = "(not shown)"
_SHORTEST = 4
"""Shorter values, in characters, are not searched for in the values of other expressions."""


def expressions(raw: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expressions in `raw` whose values come from environment variables, under the same keys.

    Each list becomes a mapping from index to value. An expression that refers to another expression, such as
    `${data.token}`, is recognised by its resolved value.

    Args:
        raw: the configuration with expressions such as `${oc.env:TOKEN}`.
        resolved: the same configuration with values in place of expressions.
    """
    secrets = {
        value for text, value in _leaves(raw, resolved) if "oc.env:" in text and len(value) >= _SHORTEST
    }
    marks = _marked(raw, resolved, secrets)
    return marks if isinstance(marks, dict) else {}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def _leaves(raw: Any, resolved: Any) -> Iterator[tuple[str, str]]:
    """Yield each expression in `raw` with its value in `resolved`, both as text."""
    if isinstance(raw, str) and "${" in raw:
        yield raw, str(resolved)
    for key, inner in _items(raw):
        yield from _leaves(inner, resolved[key])


def _marked(raw: Any, resolved: Any, secrets: set[str]) -> Any:
    """Return the expressions in `raw` that read the environment or whose values hold one of `secrets`.

    The result is None if there are none.
    """
    if isinstance(raw, str):
        reads_environment = "oc.env:" in raw
        holds_secret = "${" in raw and any(secret in str(resolved) for secret in secrets)
        return raw if reads_environment or holds_secret else None

    marks = {key: _marked(inner, resolved[key], secrets) for key, inner in _items(raw)}
    return {key: mark for key, mark in marks.items() if mark is not None} or None


def without_environment(config: Mapping[str, Any], *, digests: bool = False) -> dict[str, Any]:
    """Return a configuration in which expressions replace the values that came from environment variables.

    With `digests`, a hash of the value follows each expression, so that configurations with different values
    differ.
    """
    plain = {key: value for key, value in config.items() if key != EXPRESSIONS}
    return dict(_with_expressions(plain, config.get(EXPRESSIONS) or {}, digests))


def _with_expressions(value: Any, marks: Any, digests: bool) -> Any:
    """Return a copy of `value` in which each expression in `marks` replaces the value under the same keys."""
    if isinstance(marks, str) and digests:
        text = json.dumps(value, sort_keys=True, default=str)
        return f"{marks} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"
    if isinstance(marks, str):
        return marks
    if not marks or not isinstance(value, (Mapping, list, tuple)):
        return value

    replaced = {
        key: _with_expressions(inner, marks[key], digests) if key in marks else inner
        for key, inner in _items(value)
    }
    # `replaced` is a mapping from index to value if `value` is a list (see `_items`).
    return replaced if isinstance(value, Mapping) else list(replaced.values())


def for_readers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for a report, without values from environment variables and `cluster.env`."""
    shown = without_environment(config)
    cluster = shown.get("cluster")
    if isinstance(cluster, Mapping) and isinstance(cluster.get("env"), Mapping):
        shown["cluster"] = {**cluster, "env": dict.fromkeys(cluster["env"], NOT_SHOWN)}
    return shown


def argument_for_readers(argument: str) -> str:
    """Return a `key=value` argument for a report; the value is hidden if the key is in `cluster.env`."""
    key, given, _ = argument.partition("=")
    if given and key.lstrip("+").startswith("cluster.env"):
        return f"{key}={NOT_SHOWN}"
    return argument
