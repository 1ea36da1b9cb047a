"""The arguments of a person's script: they reach it as they were typed, not as Hydra or YAML would read them.

`1e-3` stays `1e-3`, `true` stays `true`. They are a list, or one line that is split as a shell does.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from slurmddp.errors import ConfigError

_HINT = "Write them as in a shell: program.args='--epochs 20' (or as a list: program.args='[--epochs, 20]')."
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""Hydra's escapes outside quotes."""


def typed(value: str) -> list[str]:
    """Return the arguments in what a person typed after `program.args=`; raises ConfigError."""
    text = _unquoted(value.strip())
    if text in ("", "null"):
        return []
    if not text.startswith("["):
        return _shell_words(text)
    return [
        _ESCAPED.sub(r"\1", item) if item == _unquoted(item) else _unquoted(item) for item in _items(text)
    ]


def composed(value: Any) -> list[str]:
    """Return the arguments that a composed configuration holds, as texts in the spelling of YAML."""
    if value is None or isinstance(value, str):
        return _shell_words(value or "")
    if not isinstance(value, list):
        raise ConfigError(f"`program.args` is {value!r}, not a list.", hint=_HINT)
    return [
        "null" if one is None else str(one).lower() if isinstance(one, bool) else str(one) for one in value
    ]


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"`program.args` is {text!r}: {error}.", hint=_HINT) from error


def _items(text: str) -> list[str]:
    """Return what stands between the commas of a list; commas in quotes and brackets belong to an item."""
    items, start, depth, quote, escaped = [], 1, 0, "", False
    for place, character in enumerate(text):
        if place and not depth:
            break
        if escaped or (quote and character not in ("\\", quote)):
            escaped = False
        elif character == "\\":
            escaped = True
        elif character in "'\"":
            quote = "" if quote else character
        elif depth == 1 and character in ",]":
            items.append(text[start:place].strip())
            start, depth = place + 1, 1 if character == "," else 0
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
    if depth or quote or start != len(text):
        raise ConfigError(f"`program.args` is {text}, a list that is not closed at its end.", hint=_HINT)
    return [] if items == [""] else items


def _unquoted(text: str) -> str:
    """Return a text without the quotes around it; within them a backslash counts only before such a quote."""
    quote = text[:1]
    whole = (
        len(text) > 1
        and quote in "'\""
        and re.fullmatch(rf"{quote}(\\.|[^{quote}\\])*{quote}", text, re.DOTALL)
    )
    return re.sub(rf"\\({quote}|\\(?=\\*{quote}))", r"\1", text[1:-1]) if whole else text
