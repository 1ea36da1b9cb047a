"""Translate errors of Hydra and OmegaConf: one paragraph, in the words that the person typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from slurmddp.errors import ConfigError, near_matches, nearest
from slurmddp.settings.arguments import quoted
from slurmddp.settings.removed import REMOVED_TORCHRUN, removed_torchrun
from slurmddp.settings.unknown_keys import unknown_in_file
from slurmddp.short_text import first_line

_NOT_IN_LIST = re.compile(r"Could not override '([^']+@[^']*)'")
_NOT_THERE = re.compile(r"Could not delete from config\. '([^']+)' does not exist")
_UNSET = re.compile(r"Environment variable '(.+?)' not found")
_SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", re.DOTALL)


def explain(error: Exception, typed: Iterable[str], roots: Iterable[Path] = ()) -> ConfigError:
    """Return the error to show in place of `error`.

    Args:
        error: the error that Hydra or OmegaConf raised while it composed the configuration.
        typed: the arguments as the person typed them.
        roots: the folders that Hydra searched for groups.
    """
    if (override := getattr(error, "override", None)) is not None:
        return _unreadable(str(override), typed)
    if isinstance(error, MissingConfigException):
        return _no_choice(error, typed, roots)
    if isinstance(error, RecursionError):
        return ConfigError(
            "The configuration can't be composed: a value in one of its files refers to itself.",
            hint="Look for `&name` and `*name` in the files of conf/.",
        )
    for cause in _causes(error):
        if isinstance(cause, OmegaConfBaseException) and (found := _of_a_key(cause)) is not None:
            return found
    text = "\n".join(dict.fromkeys(str(cause) for cause in _causes(error) if str(cause)))
    if match := _SEVERAL.search(text):
        return _several(_as_typed(match[1], typed))
    if match := _NOT_THERE.search(text):
        return ConfigError(
            f"~{match[1]} removes a key that is not there.", hint="See `slurmddp train --cfg`."
        )
    if match := _NOT_IN_LIST.search(text):
        group = match[1].partition("@")[0]
        return ConfigError(
            f"There is no choice {match[1]!r} that could be changed.",
            hint=f"Say {group}=NAME to choose a file of conf/{group}, +{match[1]}=NAME to add one there.",
        )
    return ConfigError(
        f"The configuration can't be composed: {_one_line(text or type(error).__name__)[:600]}",
        hint="Correct it, and look at the result with `slurmddp train --cfg`.",
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes: OmegaConf says in a cause which key is wrong."""
    return [] if error is None else [error, *_causes(error.__cause__)]


def _of_a_key(error: OmegaConfBaseException) -> ConfigError | None:
    """Return the explanation of an error that names the key of the configuration; None for another one."""
    key = error.full_key or ""
    message = first_line(error)
    last_word = message.rpartition(" ")[2]
    if isinstance(error, InterpolationKeyError):
        missing = message.split("'")[1]
        return ConfigError(
            f"`{key}` is taken from `{missing}`, which the configuration doesn't have.",
            hint=f"Give {key}=... itself, or add `{missing}`.",
        )
    if unset := _UNSET.search(message):
        return ConfigError(
            f"`{key}` is taken from the environment variable {unset[1]}, which is not set.",
            hint=f"Set it, or give a default: ${{oc.env:{unset[1]},VALUE}}.",
        )
    if isinstance(error, UnsupportedInterpolationType):
        return ConfigError(
            f"`{key}` uses ${{{last_word}:...}}, which is not known here.",
            hint="Use another key (${data.x}) or ${oc.env:NAME}; write \\${ for a plain ${.",
        )
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"`{key}` must be given: its file says ???.", hint=f"Say {key}=...")
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        if key == REMOVED_TORCHRUN:
            return removed_torchrun()
        node, _, name = key.rpartition(".")
        known = [str(one) for one in error.parent_node or () if not str(one).startswith("_")]
        return unknown_in_file(node, name, known)
    return None


def _no_choice(error: MissingConfigException, typed: Iterable[str], roots: Iterable[Path]) -> ConfigError:
    """Return the error for a file of a group that no folder has."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    known = [str(one) for one in error.options or ()]
    near = near_matches(choice, known)
    known_too = f"All: {', '.join(sorted(known))}." if nearest(choice, known) else ""
    file = f"A file conf/{error.missing_cfg_file}.yaml in your project folder would be found."
    places = " and ".join(str(root / group) for root in roots)
    in_file = re.match(r"In '((?!slurmddp_primary).+?)'", str(error))
    is_typed = any(choice in text for text in typed)
    where = in_file[1] if in_file else "" if is_typed else "slurmddp"
    source = where and f" (from conf/{where}.yaml)"
    return ConfigError(
        f"There is no {group or 'file'} {choice!r}{source}; looked in {places}.",
        hint=" ".join(filter(None, [near, known_too, file])),
    )


def _one_line(text: str) -> str:
    shown = [line.strip() for line in text.split("\nConfig search path")[0].splitlines()]
    kept = [line for line in shown if line and not line.startswith(("object_type=", "reference_type="))]
    return " ".join(kept).replace("In 'slurmddp_primary': ", "")


def _as_typed(override: str, typed: Iterable[str]) -> str:
    """Return the argument as typed; Hydra knows it with a sign that the plan gave it."""
    bare = override.lstrip("+")
    return next((text for text in typed if text.lstrip("+") == bare), bare)


def _unreadable(override: str, typed: Iterable[str]) -> ConfigError:
    text = _as_typed(override, typed)
    key, _, value = text.partition("=")
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    literal = shlex.quote(f"{key}={quoted(bare) if bare.isprintable() else chr(34) + '...' + chr(34)}")
    return ConfigError(
        f"The value in {text!r} can't be read: it holds a character that means something in Hydra's grammar, "
        "or a quote or bracket that is never closed.",
        hint=f"To take it as it stands, quote it inside the argument as well: {literal}",
    )


def _several(text: str) -> ConfigError:
    key, _, value = text.partition("=")
    return ConfigError(
        f"{text!r} asks for several runs, and one command starts one run.",
        hint=f"For several runs add -m (--multirun). For a list write {shlex.quote(f'{key}=[{value}]')}, "
        f"for a text with commas {shlex.quote(f'{key}={chr(34)}{value}{chr(34)}')}.",
    )
