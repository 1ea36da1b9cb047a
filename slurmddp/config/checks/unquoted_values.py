"""Refuse values of text keys whose spelling YAML or Hydra's grammar has changed.

YAML reads `12:00:00` as 43200, `012345` as 5349 and `12.10` as 12.1. As a time limit, an account or a version
these are other texts than the ones that were written. So is `yes`, which YAML reads as true, as an argument.
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
"""A plain word that may be a number."""
_ARGUMENT = r"([-+]?[0-9.][\w:.+-]*|[A-Za-z]+)"
"""A plain word that may be a number, or true or false."""


def refuse_respelled(config: Mapping[str, Any], typed: Iterable[str], files: Iterable[Path]) -> None:
    """Raise ConfigError if a text key holds a number that was written in another way.

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
            if (written := _written_otherwise(key, value, pattern, text)) is not None:
                read_as = str(value).lower() if isinstance(value, bool) else f"the number {value}"
                raise ConfigError(
                    f"{place} says {name}: {written} without quotes, which is read as {read_as}, "
                    f"and `{key}` is a text.",
                    hint=f'Write "{written}", on the command line \'{key}="{written}"\'.',
                )


def _numbers_in_text_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Number]]:
    """Yield key and value of each number that will be used as a text."""
    for key in every_key().values():
        value = _at(config, key.name)
        if str in key.types and _is_number(value):
            yield key.name, value
        elif isinstance(value, Mapping) and any(map(_is_texts, key.types)):
            yield from ((f"{key.name}.{name}", one) for name, one in value.items() if _is_number(one))
        elif isinstance(value, list) and key.name in EVERY_ARGUMENTS:
            yield from ((key.name, one) for one in value if isinstance(one, (int, float)))
        elif isinstance(value, list) and any(map(_is_texts, key.types)):
            yield from ((key.name, one) for one in value if _is_number(one))


def _is_texts(kind: Any) -> bool:
    """Return whether a type is a mapping to texts or a list of texts."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0] is str
    inner = get_args(kind)[-1] if get_origin(kind) is Mapping else None
    return inner is str or str in get_args(inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _patterns(key: str, texts: str) -> dict[str, str]:
    """Return the patterns of a value of `key`, by the name that stands beside it.

    The name is the key's, or of the key or anchor that the key refers to: `${name}` or `*name`.
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
    """Return the pattern of a key, with the anchor that its value may have."""
    return rf"(?<![\w-])[\"']?{re.escape(name)}[\"']?\s*[:=]\s*(?:&[\w-]+\s+)?"


def _written_otherwise(key: str, value: Number, pattern: str, text: str) -> str | None:
    """Return a word of `text` that stands for `value` where `pattern` matches, and is spelled otherwise."""
    for written in re.findall(pattern, text, re.MULTILINE):
        parsed = _as_yaml(written)
        if type(parsed) is type(value) and parsed == value and not _is_alike(key, written, value):
            return str(written)
    return None


def _is_alike(key: str, written: str, value: Number) -> bool:
    """Return whether a key that takes the spelling `written` has the same meaning with `value`."""
    if written == str(value).lower():
        return True
    if key in EVERY_ARGUMENTS and not isinstance(value, bool):
        return "e" in written.lower()  # 1e-3 and 0.001 are the same to any program.
    takes_numbers = key in every_key() and int in every_key()[key].types
    return takes_numbers and ":" not in written and not written.startswith("0")


def _as_yaml(word: str) -> Any:
    try:
        return OmegaConf.select(OmegaConf.create(f"value: {word}"), "value")
    except (OmegaConfBaseException, YAMLError, ValueError):
        return None
