"""Translate errors of Hydra and OmegaConf to one paragraph that quotes the settings as typed."""

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

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches, nearest
from slurmddp.settings.arguments import quoted
from slurmddp.settings.removed import REMOVED_TORCHRUN, removed_torchrun
from slurmddp.settings.unknown_keys import unknown_in_file
from slurmddp.short_text import first_line

_NOT_IN_LIST = re.compile(r"Could not override '([^']+@[^']*)'")
_NOT_FOUND = re.compile(r"Could not delete from config\. '([^']+)' does not exist")
_UNSET = re.compile(r"Environment variable '(.+?)' not found")
_SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", re.DOTALL)


def explain(error: Exception, typed: Iterable[str], roots: Iterable[Path] = ()) -> ConfigError:
    """Return a ConfigError that explains an error of Hydra or OmegaConf.

    Args:
        error: the error that Hydra or OmegaConf raised while it composed the configuration.
        typed: the settings as typed.
        roots: the folders that Hydra searched for groups.
    """
    override = getattr(error, "override", None)
    if override is not None:
        return _unreadable(str(override), typed)
    if isinstance(error, MissingConfigException):
        return _no_choice(error, typed, roots)
    if isinstance(error, RecursionError):
        return ConfigError(
            "The configuration can't be composed: a value in one of its files refers to itself.",
            hint="Look for `&name` and `*name` in the files of conf/.",
        )

    for cause in _causes(error):
        if isinstance(cause, OmegaConfBaseException):
            explained = _of_a_key(cause)
            if explained is not None:
                return explained

    text = "\n".join(dict.fromkeys(str(cause) for cause in _causes(error) if str(cause)))
    return _by_text(text or type(error).__name__, typed)


def _by_text(text: str, typed: Iterable[str]) -> ConfigError:
    """Return the ConfigError for an error that can be recognized only by its text."""
    if match := _SEVERAL.search(text):
        return _several(_as_typed(match[1], typed))
    if match := _NOT_FOUND.search(text):
        return ConfigError(
            f"~{match[1]} removes a key that does not exist.", hint="`slurmddp train --cfg` shows all keys."
        )
    if match := _NOT_IN_LIST.search(text):
        group = match[1].partition("@")[0]
        return ConfigError(
            f"{match[1]!r} is to replace a choice, but `defaults` has no choice of this name.",
            hint=f"Use {group}=NAME to choose a file of conf/{group}, or +{match[1]}=NAME to add a choice.",
        )
    return ConfigError(
        f"The configuration can't be composed: {_one_line(text)[:600]}",
        hint="Correct the setting or file, and check the result with `slurmddp train --cfg`.",
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and the chain of its `__cause__`s; often only a cause names the wrong key."""
    return [] if error is None else [error, *_causes(error.__cause__)]


def _of_a_key(error: OmegaConfBaseException) -> ConfigError | None:
    """Return the ConfigError for an OmegaConf error about one key; None for any other error."""
    key = error.full_key or ""
    message = first_line(error)
    last_word = message.rpartition(" ")[2]

    if isinstance(error, InterpolationKeyError):
        missing = message.split("'")[1]
        return ConfigError(
            f"`{key}` is taken from `{missing}`, a key that the configuration doesn't have.",
            hint=f"Set {key}=..., or add the key `{missing}`.",
        )
    if unset := _UNSET.search(message):
        return ConfigError(
            f"`{key}` is taken from the environment variable {unset[1]}, which is not set.",
            hint=f"Set the variable, or give a default: ${{oc.env:{unset[1]},VALUE}}.",
        )
    if isinstance(error, UnsupportedInterpolationType):
        return ConfigError(
            f"`{key}` uses ${{{last_word}:...}}, but no resolver has this name.",
            hint="Use another key (${data.x}) or ${oc.env:NAME}; write \\${ for a plain ${.",
        )
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(
            f"`{key}` must be given, because its value in a file is ???.", hint=f"Use {key}=VALUE."
        )

    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        if key == REMOVED_TORCHRUN:
            return removed_torchrun()
        node, _, name = key.rpartition(".")
        known = [str(inner) for inner in error.parent_node or () if not str(inner).startswith("_")]
        return unknown_in_file(node, name, known)
    return None


def _no_choice(error: MissingConfigException, typed: Iterable[str], roots: Iterable[Path]) -> ConfigError:
    """Return the error for a choice `GROUP=NAME` for which no folder has a file."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    known = [str(name) for name in error.options or ()]
    sentences = [near_matches(choice, known)]
    if nearest(choice, known):
        sentences.append(f"All: {', '.join(sorted(known))}.")
    sentences.append(f"slurmddp would also read a file conf/{error.missing_cfg_file}.yaml of your project.")

    # Hydra's text begins with the file that makes the choice, except for the primary configuration. There
    # the choice comes from the command line or from the project's defaults.
    source = ""
    in_file = re.match(r"In '((?!slurmddp_primary).+?)'", str(error))
    if in_file:
        source = f" (from conf/{in_file[1]}.yaml)"
    elif not any(choice in text for text in typed):
        source = " (from conf/slurmddp.yaml)"

    places = " and ".join(str(root / group) for root in roots)
    return ConfigError(
        f"There is no {group or 'file'} {choice!r}{source}; looked in {places}.",
        hint=" ".join(filter(None, sentences)),
    )


def _one_line(text: str) -> str:
    """Return the text of Hydra's errors on one line, without the search path and Hydra's object types."""
    lines = [line.strip() for line in text.split("\nConfig search path")[0].splitlines()]
    kept = [line for line in lines if line and not line.startswith(("object_type=", "reference_type="))]
    return " ".join(kept).replace("In 'slurmddp_primary': ", "")


def _as_typed(override: str, typed: Iterable[str]) -> str:
    """Return the setting as it was typed, from an override to which the plan may have added `+` or `++`."""
    bare = override.lstrip("+")
    return next((text for text in typed if text.lstrip("+") == bare), bare)


def _unreadable(override: str, typed: Iterable[str]) -> ConfigError:
    """Return the error for a value that Hydra's grammar can't read."""
    text = _as_typed(override, typed)
    key, _, value = text.partition("=")
    # A function of Hydra 1.4 alone. Hydra 1.5 removes it.
    if value.startswith("extend_list("):
        return ConfigError(
            f"{text!r} extends a list, which is not supported.",
            hint=f"Write the whole list: {key}=[...]",
        )
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]

    literal = quoted(value) if value.isprintable() else '"..."'
    return ConfigError(
        f"The value in {text!r} can't be read: it holds a special character of Hydra's grammar, or a quote "
        "or bracket that is not closed.",
        hint=f"To use the text as it is, quote it inside the setting, too: {shlex.quote(f'{key}={literal}')}",
    )


def _several(text: str) -> ConfigError:
    """Return the error for a setting with several values in a command without --multirun."""
    key, _, value = text.partition("=")
    as_list = shlex.quote(f"{key}=[{value}]")
    as_text = shlex.quote(f'{key}="{value}"')
    return ConfigError(
        f"{text!r} has a value for each of several runs, but one command starts one run.",
        hint=f"For several runs add -m (--multirun). For a list write {as_list}, for a text with commas "
        f"{as_text}.",
    )
