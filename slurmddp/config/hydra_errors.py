"""Says in one paragraph what Hydra and OmegaConf say in many lines and in their own terms."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurmddp.errors import ConfigError, near_matches

_NOT_IN_STRUCT = re.compile(r"Could not override '([^']+)'")
_NOT_THERE = re.compile(r"Could not delete from config\. '([^']+)' does not exist")
_INTERPOLATION = re.compile(r"Interpolation key '([^']*)' not found")
_RESOLVER = re.compile(r"Unsupported interpolation type (\S+)")
_FULL_KEY = re.compile(r"full_key: (\S+)")
_MISSING = re.compile(r"Missing mandatory value: (\S+)")
_OPTION = re.compile(r"Could not find '([^']+)/([^']+)'")
_UNREADABLE = re.compile(r"(Lexer|Parser|InputMismatch|FailedPredicate|HydraException|Exception).*")


def unknown_in_node(error: Exception) -> str | None:
    """Return the key that Hydra refused because its node has no such key, or None."""
    match = _NOT_IN_STRUCT.search(_words(error))
    return match[1] if match else None


def no_such_key(key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that a node of the configuration doesn't have."""
    if "@" in key:
        group = key.partition("@")[0]
        return ConfigError(
            f"There is no choice {key!r} that could be changed.",
            hint=f"Say {group}=NAME to choose a file of conf/{group}, +{key}=NAME to add one at that place.",
        )
    node, _, name = key.rpartition(".")
    keys = [one for one in known if not one.startswith("_")]
    return ConfigError(
        f"`{node}` has no key {name!r}.",
        hint=f"{near_matches(name, keys, prefix=f'{node}.')} To pass it to the code all the same, "
        f"write +{key}=...".strip(),
    )


def explain(error: Exception, typed: Iterable[str]) -> ConfigError:
    """Return what went wrong in composing, for the arguments as the person typed them."""
    if (override := getattr(error, "override", None)) is not None:
        return _unreadable(str(override), typed)
    if isinstance(error, RecursionError):
        return ConfigError(
            "The configuration can't be composed: a value in one of its files refers to itself.",
            hint="Look for `&name` and `*name` in the files of conf/.",
        )
    words = _words(error)
    if "Ambiguous value" in words or "Sweep parameters" in words:
        return _several(words, typed)
    for pattern, make in (
        (_NOT_THERE, _not_there),
        (_INTERPOLATION, _interpolation),
        (_RESOLVER, _resolver),
        (_MISSING, _mandatory),
        (_OPTION, _option),
    ):
        if match := pattern.search(words):
            return make(match, words)
    return ConfigError(
        f"The configuration can't be composed: {_one_line(words)[:600]}",
        hint="Correct it, and look at the result with `slurmddp train --cfg`.",
    )


def _words(error: Exception) -> str:
    """Return the text of an error and of those that caused it: there OmegaConf says what is wrong."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if str(cause) and str(cause) not in texts:
            texts.append(str(cause))
        cause = cause.__cause__
    return "\n".join(texts) or type(error).__name__


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
    literal = _for_shell(f"{key}={quoted(bare) if bare.isprintable() else chr(34) + '...' + chr(34)}")
    return ConfigError(
        f"The value in {text!r} can't be read: it holds a character that means something in Hydra's grammar, "
        "or a quote or bracket that is never closed.",
        hint=f"To take it as it stands, quote it inside the argument as well: {literal}",
    )


def quoted(value: str) -> str:
    """Return `value` as Hydra's grammar quotes it: a backslash counts only before a quote, or at the end."""
    inner = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + (found[2] and '\\"'), value)
    return f'"{inner}"'


def _for_shell(text: str) -> str:
    # shlex.quote without its import: single quotes hold everything but themselves.
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _several(words: str, typed: Iterable[str]) -> ConfigError:
    match = re.search(r"(?:argument|parameters) '(.*?)'(?: requires)?", words, re.DOTALL)
    text = _as_typed(match[1], typed) if match else "An argument"
    key, _, value = text.partition("=")
    return ConfigError(
        f"{text!r} asks for several runs, and one command starts one run.",
        hint=f"For a list write {_for_shell(f'{key}=[{value}]')}, for a text with commas "
        f"{_for_shell(f'{key}={chr(34)}{value}{chr(34)}')}; for several runs, one command each.",
    )


def _not_there(match: re.Match[str], words: str) -> ConfigError:
    return ConfigError(f"~{match[1]} takes away a key that is not there.", hint="See `slurmddp train --cfg`.")


def _interpolation(match: re.Match[str], words: str) -> ConfigError:
    key = _FULL_KEY.search(words)
    where = f"`{key[1]}`" if key else "A value"
    return ConfigError(
        f"{where} is taken from `{match[1]}`, which the configuration doesn't have.",
        hint=f"Give {key[1]}=... itself, or add `{match[1]}`." if key else f"Add `{match[1]}`.",
    )


def _resolver(match: re.Match[str], words: str) -> ConfigError:
    key = _FULL_KEY.search(words)
    where = f"`{key[1]}`" if key else "A value"
    return ConfigError(
        f"{where} uses ${{{match[1]}:...}}, which is not known here.",
        hint="Use another key (${data.x}) or ${oc.env:NAME}; write \\${ for a plain ${.",
    )


def _mandatory(match: re.Match[str], words: str) -> ConfigError:
    full = _FULL_KEY.search(words)
    key = full[1] if full else match[1]
    return ConfigError(f"`{key}` must be given: its file says ???.", hint=f"Say {key}=...")


def _option(match: re.Match[str], words: str) -> ConfigError:
    listed = re.search(r"Available options in '[^']*':\n((?:\s+\S+\n?)*)", words)
    names = listed[1].split() if listed else []
    return ConfigError(
        f"{_one_line(words.split('Could not find')[0])} There is no {match[1]} {match[2]!r}.".strip(),
        hint=near_matches(match[2], names) or f"Add conf/{match[1]}/{match[2]}.yaml to your project folder.",
    )
