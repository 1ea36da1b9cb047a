"""Hand the arguments of a script through as typed; quote and unquote values as Hydra does.

Hydra's grammar would turn `1e-3` into 0.001 and refuse `c;d`. The arguments are a list, or one line that is
split as a shell does.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.settings.spec import CONTROLLER, FUNCTION_CALL, MODULE

ARGUMENTS = "program.args"
"""The key of the arguments."""
FREE_ARGUMENTS = "program.free_args"
RESUME_ARGUMENTS = "program.resume_args"
EVERY_ARGUMENTS = (ARGUMENTS, FREE_ARGUMENTS, RESUME_ARGUMENTS)
"""The keys that hold arguments of a script, as typed."""
_HINT = "Write them as in a shell: program.args='--epochs 20' (or as a list: program.args='[--epochs, 20]')."
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""Hydra's escapes outside quotes."""
_TOKEN = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|.""", re.DOTALL)
"""An escaped character, a text in quotes, or one character."""
_UNCLOSED = ("'", '"', "\\")
REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""`${` as OmegaConf reads it as a reference: after an even number of backslashes."""
_VALUES = frozenset({"true", "false", "null", "inf", "nan"})
"""Words that Hydra's grammar does not read as texts."""


def typed(value: str) -> list[str]:
    """Return the arguments that were typed after `program.args=`; raises ConfigError."""
    text = unquoted(value.strip())
    if text in ("", "null"):
        return []
    if not text.startswith("["):
        return _shell_words(text)
    return [_ESCAPED.sub(r"\1", item) if item == unquoted(item) else unquoted(item) for item in _items(text)]


def choices(value: str) -> list[str] | None:
    """Return the values of a sweep over arguments, `choice([--lr,1],[--lr,2])`, as typed; None for no sweep.

    Raises:
        ConfigError: a bracket or a quote is not closed.
    """
    if not value.startswith("choice("):
        return None
    return _items(value.removeprefix("choice"), end=")")


def key_of(word: str) -> str:
    """Return the key of a setting as typed: `+a.b=1` has the key `a.b`."""
    return word.lstrip("+").partition("=")[0]


def as_typed(words: Sequence[str]) -> list[str]:
    """Return settings with the program and its arguments at the end, as after `slurmddp run` or `controller`.

    Args:
        words: settings (`key=value`); `program.script` and `program.args` may be among them. Arguments that
            refer to other values remain a setting, because `slurmddp run` reads few references.
    """
    settings, script, arguments = [], [], []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "program.script":
            program = _without_escapes(unquoted(value))
            if program != CONTROLLER:  # Its arguments begin with the script that was typed.
                script = program.split(" ", 1) if program.startswith(MODULE) else [program]
        elif key == "program.args" and not REFERENCE.search(value):
            arguments = [*map(_without_escapes, typed(value))]
        else:
            settings.append(word)
    return [*settings, *script, *arguments]


def on_one_line(words: Sequence[str]) -> str:
    """Return settings and their program as one line of a shell; a function as a call, `pow(2.0, 3.0)`."""
    line, program = as_typed(words), FUNCTION_CALL.split()
    before, after = line[: -len(program) - 3], line[-len(program) - 3 :]
    call = call_of(after[len(program) :]) if after[: len(program)] == program else None
    return shlex.join(line) if call is None else f"{shlex.join(before)} {call}".lstrip()


def call_of(arguments: Sequence[str]) -> str | None:
    """Return the call that the arguments of a function's program stand for; None if they are damaged.

    Args:
        arguments: the word for the run folder, the path of the function, its arguments as JSON.
    """
    try:
        _, function, values = arguments
        return f"{function}({', '.join(map(repr, json.loads(values)))})"
    except (ValueError, TypeError):
        return None


def composed(value: Any) -> list[str]:
    """Return the arguments of a composed configuration as texts, spelled as in YAML."""
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


def _items(text: str, *, end: str = "]") -> list[str]:
    """Return the texts between the commas of a list; commas in quotes and brackets belong to an item.

    Args:
        text: the list with its brackets.
        end: the closing bracket.
    """
    items, depth = [""], 0
    for token in _TOKEN.findall(text[1:-1]):
        depth += (token in "[{(") - (token in "]})")
        if depth < 0 or token in _UNCLOSED:
            break
        if token == "," and not depth:
            items.append("")
        else:
            items[-1] += token
    else:
        if text.endswith(end) and not depth:
            found = [item.strip() for item in items]
            return [] if found == [""] else found
    raise ConfigError(
        f"`program.args` is {text}, a list that is not closed at its end.",
        hint=f"{_HINT} Several lists are a sweep, over program.args='choice([--epochs,20],[--epochs,30])'.",
    )


def unquoted(text: str) -> str:
    """Return a text without the quotes around it; inside, a backslash counts only before such a quote."""
    quote = text[:1]
    whole = (
        len(text) > 1
        and quote in "'\""
        and re.fullmatch(rf"{quote}(\\.|[^{quote}\\])*{quote}", text, re.DOTALL)
    )
    return re.sub(rf"\\({quote}|\\(?=\\*({quote}|\Z)))", r"\1", text[1:-1]) if whole else text


def spelled(value: Any) -> str:
    """Return a value as Hydra's grammar writes it: a text, a number, None, a list or a mapping."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{spelled(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spelled, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z][\w./]*", text) and text.lower() not in _VALUES
    return text if is_plain else quoted(text)


def quoted(value: str) -> str:
    """Return `value` as Hydra's grammar quotes it: a backslash counts only before a quote, or at the end."""
    inner = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + (found[2] and '\\"'), value)
    return f'"{inner}"'


def literal(word: str, keys: Collection[str] = ()) -> str:
    """Return a word as `quoted`, in which OmegaConf finds no reference: `${x}` stays `${x}`.

    Args:
        word: the word as typed.
        keys: keys to which the word may refer. `${KEY}` becomes the value of such a key.
    """

    def escaped(found: re.Match[str]) -> str:
        return found[1] * 2 + ("" if found[3] in keys else "\\") + found[2]

    return quoted(re.sub(r"(\\*)(\$\{(?:([\w.]+)\})?)", escaped, word))


def _without_escapes(word: str) -> str:
    """Return the word from which `literal` made the unquoted text `word`."""
    return re.sub(r"(\\*)\\\$\{", lambda found: found[1][::2] + "${", word)
