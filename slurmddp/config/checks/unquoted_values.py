"""Refuse unquoted values of text keys that YAML or Hydra's grammar has read as another value.

YAML reads `12:00:00` as 43200, `012345` as 5349 and `12.10` as 12.1. A time limit, an account or a version
would then be another text than the written one. So would the argument `yes`, which YAML reads as true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from slurmddp.errors import ConfigError
from slurmddp.settings.arguments import EVERY_ARGUMENTS
from slurmddp.settings.keys import every_key

Number = int | float
_TOKEN = r"([-+]?[0-9.][\w:.+-]*)"
"""An unquoted word that may be a number."""
_ARGUMENT = r"([-+]?[0-9.][\w:.+-]*|[A-Za-z]+)"
"""An unquoted word that may be a number, true or false."""


def refuse_respelled(config: Mapping[str, Any], typed: Iterable[str], files: Iterable[Path]) -> None:
    """Raise ConfigError if YAML read the unquoted value of a text key as a number with another spelling.

    For example, YAML reads `12.10` as the number `12.1`.

    Args:
        config: a composed configuration.
        typed: the settings of the command line.
        files: the files of the configuration; they are read only if a text key holds a number.
    """
    numbers = list(_numbers_in_text_keys(config))
    if not numbers:
        return

    texts = {"The command line": " ".join(typed)}
    for path in files:
        texts[str(path)] = path.read_text(encoding="utf-8", errors="replace")

    for key, value in numbers:
        patterns = _patterns(key, "\n".join(texts.values()))
        for (place, text), (name, pattern) in product(texts.items(), patterns.items()):
            written = _written_otherwise(key, value, pattern, text)
            if written is None:
                continue

            read_as = str(value).lower() if isinstance(value, bool) else f"the number {value}"
            raise ConfigError(
                f"{place} holds {name}: {written} without quotes. YAML reads this as {read_as}, "
                f"but `{key}` is a text.",
                hint=f'Write "{written}", or on the command line \'{key}="{written}"\'.',
            )


def _numbers_in_text_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Number]]:
    """Yield (key, value) for each number in a key of type text, or in a list or mapping of texts."""
    for key in every_key().values():
        value = _at(config, key.name)
        if str in key.types and _is_number(value):
            yield key.name, value
        elif isinstance(value, Mapping) and any(map(_is_texts, key.types)):
            yield from ((f"{key.name}.{name}", inner) for name, inner in value.items() if _is_number(inner))
        elif isinstance(value, list) and key.name in EVERY_ARGUMENTS:
            # Here true and false count, too: a script gets another argument if YAML reads `yes` as true.
            yield from ((key.name, item) for item in value if isinstance(item, (int, float)))
        elif isinstance(value, list) and any(map(_is_texts, key.types)):
            yield from ((key.name, item) for item in value if _is_number(item))


def _is_texts(kind: Any) -> bool:
    """Return whether a type of the schema is a list of texts, or a mapping whose values may be texts."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0] is str
    if get_origin(kind) is Mapping:
        value = get_args(kind)[-1]
        return value is str or str in get_args(value)
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if the configuration does not have the key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _patterns(key: str, texts: str) -> dict[str, str]:
    """Return regular expressions that find the written value of a key, by the name that is shown for it.

    The value stands after the last part of the key, or after another key or an anchor to which the key
    refers: `${name}` or `*name`.

    Args:
        key: the full name of the key.
        texts: the command line and all files, in which references are looked up.
    """
    name = key.rpartition(".")[2]
    if key in EVERY_ARGUMENTS:
        return {name: rf"(?:[\[,]|-)\s*{_ARGUMENT}(?=\s*(?:[,\]#]|$))"}

    end = r"(?=[\s,}\]]|$)"
    patterns = {name: f"{_before(name)}{_TOKEN}{end}"}
    for other, anchor in re.findall(_before(name) + r"[\"']?(?:\$\{[\w.]*?(\w+)\}|\*([\w-]+))", texts):
        if anchor:
            patterns[f"&{anchor}"] = rf"&{re.escape(anchor)}\s+{_TOKEN}{end}"
        else:
            patterns[other] = f"{_before(other)}{_TOKEN}{end}"
    return patterns


def _before(name: str) -> str:
    """Return a regular expression for the text between the name of a key and its value: `name: &anchor `."""
    return rf"(?<![\w-])[\"']?{re.escape(name)}[\"']?\s*[:=]\s*(?:&[\w-]+\s+)?"


def _written_otherwise(key: str, value: Number, pattern: str, text: str) -> str | None:
    """Return a word of `text` that YAML reads as `value`, but that is not spelled like it; else None.

    Args:
        key: the key that got the value.
        value: the value that YAML has read.
        pattern: a regular expression from `_patterns`.
        text: the command line, or the text of a file.
    """
    for written in re.findall(pattern, text, re.MULTILINE):
        parsed = _as_yaml(written)
        if type(parsed) is type(value) and parsed == value and not _is_alike(key, written, value):
            return str(written)
    return None


def _is_alike(key: str, written: str, value: Number) -> bool:
    """Return whether `written` and the text of `value` mean the same for a key."""
    if written == str(value).lower():
        return True
    if key in EVERY_ARGUMENTS and not isinstance(value, bool):
        # A script that parses the number gets the same for 1e-3 and 0.001, so this is no error.
        return "e" in written.lower()

    takes_numbers = key in every_key() and int in every_key()[key].types
    return takes_numbers and ":" not in written and not written.startswith("0")


def _as_yaml(word: str) -> Any:
    """Return the value of a word in YAML; None if YAML can't read it."""
    try:
        return OmegaConf.select(OmegaConf.create(f"value: {word}"), "value")
    except (OmegaConfBaseException, YAMLError, ValueError):
        return None
