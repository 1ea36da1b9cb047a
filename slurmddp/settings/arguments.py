"""Keep the arguments of a script as typed: quote them for Hydra, and take them out of Hydra's quotes.

Hydra's grammar would turn the argument `1e-3` into 0.001 and refuse `c;d`. Arguments are a list, or one line
that is split as by a shell.
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
FREE_ARGUMENTS = "program.free_args"
RESUME_ARGUMENTS = "program.resume_args"
EVERY_ARGUMENTS = (ARGUMENTS, FREE_ARGUMENTS, RESUME_ARGUMENTS)
"""The keys that hold arguments of a script."""
_HINT = "Write them as in a shell: program.args='--epochs 20' (or as a list: program.args='[--epochs, 20]')."
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""Matches an escaped character outside of quotes, in Hydra's grammar."""
_TOKEN = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|.""", re.DOTALL)
"""Matches a token of Hydra's grammar: an escaped character, a text in quotes, or any other character."""
_UNCLOSED = ("'", '"', "\\")
"""Tokens that begin a quoted text or an escape which the text never completes."""
REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Matches the beginning of a reference to another value: `${` after an even number of backslashes."""
_VALUES = frozenset({"true", "false", "null", "inf", "nan"})
"""Matches words, such as `true` and `1e-3`, that Hydra's grammar does not read as text."""


def typed(value: str) -> list[str]:
    """Return the list of arguments in the text after `program.args=`.

    Args:
        value: a list in Hydra's grammar, `[--lr,1e-3]`, or a line that is split as by a shell.

    Raises:
        ConfigError: a bracket or a quote is not closed.
    """
    text = unquoted(value.strip())
    if text in ("", "null"):
        return []
    if not text.startswith("["):
        return _shell_words(text)
    return [_unescaped(item) for item in _items(text)]


def _unescaped(item: str) -> str:
    """Return the text of an item of a list in Hydra's grammar, without quotes and escapes."""
    bare = unquoted(item)
    if bare != item:
        return bare
    return _ESCAPED.sub(r"\1", item)


def choices(value: str) -> list[str] | None:
    """Return the values of a sweep over arguments as typed: `[--lr,1]` and `[--lr,2]`.

    Args:
        value: the text after `program.args=`, such as `choice([--lr,1],[--lr,2])`.

    Returns:
        None if the text is no `choice(...)`.

    Raises:
        ConfigError: a bracket or a quote is not closed.
    """
    if not value.startswith("choice("):
        return None
    return _items(value.removeprefix("choice"), end=")")


def key_of(word: str) -> str:
    """Return the key of a typed setting: `+a.b=1` has the key `a.b`."""
    return word.lstrip("+").partition("=")[0]


def as_typed(settings: Sequence[str]) -> list[str]:
    """Return the words to type after `slurmddp run` or `slurmddp controller` for the settings of a run.

    The program and its arguments, which are the settings `program.script` and `program.args`, come last.

    Args:
        settings: the settings (`key=value`). If `program.args` refers to other values (`${...}`), it stays a
            setting, because after the program `slurmddp run` replaces only few references.
    """
    others: list[str] = []
    script: list[str] = []
    arguments: list[str] = []
    for setting in settings:
        key, _, value = setting.lstrip("+").partition("=")
        if key == "program.script":
            script = _script_as_typed(value)
        elif key == ARGUMENTS and not REFERENCE.search(value):
            arguments = [_without_escapes(argument) for argument in typed(value)]
        else:
            others.append(setting)

    return [*others, *script, *arguments]


def _script_as_typed(value: str) -> list[str]:
    """Return the words to type for a value of `program.script`: a path, a command, or `-m` and a module."""
    program = _without_escapes(unquoted(value))
    # For `slurmddp controller` the script is not typed here: it is the first of `program.args`.
    if program == CONTROLLER:
        return []
    if program.startswith(MODULE):
        return program.split(" ", 1)
    return [program]


def on_one_line(words: Sequence[str]) -> str:
    """Return the settings of a run as one line to show: settings, program, arguments, with shell quotes.

    For a run of `slurmddp.submit`, the program is shown as the call of the function: `pow(2.0, 3.0)`.
    """
    line = as_typed(words)
    program = FUNCTION_CALL.split()

    # The program that calls a function has three arguments, described at `call_of`.
    start = len(line) - len(program) - 3
    call = None
    if start >= 0 and line[start : start + len(program)] == program:
        call = call_of(line[start + len(program) :])

    if call is None:
        return shlex.join(line)
    return f"{shlex.join(line[:start])} {call}".lstrip()


def call_of(arguments: Sequence[str]) -> str | None:
    """Return the call of a function as text, such as `pow(2.0, 3.0)`; None if the arguments can't be read.

    Args:
        arguments: the run folder, the import path of the function, and the function's arguments as JSON.
    """
    try:
        _, function, values = arguments
        return f"{function}({', '.join(map(repr, json.loads(values)))})"
    except (ValueError, TypeError):
        return None


def composed(value: Any) -> list[str]:
    """Return the arguments in a composed configuration as texts.

    Values that YAML has read as another type are spelled as in YAML: `true`, `null`, `0.5`.

    Raises:
        ConfigError: `value` is neither a list nor a text, or a quote in the text is not closed.
    """
    if value is None or isinstance(value, str):
        return _shell_words(value or "")
    if not isinstance(value, list):
        raise ConfigError(f"`program.args` is {value!r}, not a list.", hint=_HINT)
    return [_as_yaml(argument) for argument in value]


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


def _shell_words(text: str) -> list[str]:
    """Split a line as a shell does; raise ConfigError if a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"`program.args` is {text!r}: {error}.", hint=_HINT) from error


def _items(text: str, *, end: str = "]") -> list[str]:
    """Return the items of a list as written; commas in quotes and inner brackets do not split.

    Args:
        text: the list with its brackets.
        end: the closing bracket.

    Raises:
        ConfigError: a bracket or a quote is not closed.
    """
    items = [""]
    depth = 0
    is_closed = text.endswith(end)
    for token in _TOKEN.findall(text[1:-1]):
        depth += (token in "[{(") - (token in "]})")
        if depth < 0 or token in _UNCLOSED:
            is_closed = False
            break

        if token == "," and depth == 0:
            items.append("")
        else:
            items[-1] += token

    if not is_closed or depth != 0:
        raise ConfigError(
            f"`program.args` is {text}, but its brackets or quotes are not closed at its end.",
            hint=f"{_HINT} A sweep over several lists is program.args='choice([--epochs,20],[--epochs,30])'.",
        )
    items = [item.strip() for item in items]
    return [] if items == [""] else items


def unquoted(text: str) -> str:
    """Return a text without the quotes around it, read as in Hydra's grammar.

    Inside, a backslash escapes only the quote character and the backslashes before it. A text that is not
    wholly in quotes is returned unchanged.
    """
    quote = text[:1]
    if len(text) < 2 or quote not in "'\"":
        return text
    if not re.fullmatch(rf"{quote}(\\.|[^{quote}\\])*{quote}", text, re.DOTALL):
        return text
    return re.sub(rf"\\({quote}|\\(?=\\*({quote}|\Z)))", r"\1", text[1:-1])


def spelled(value: Any) -> str:
    """Return a value as it must be written in Hydra's grammar; a text is quoted where necessary."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{spelled(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spelled, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)

    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z][\w./]*", text) and text.lower() not in _VALUES
    return text if is_plain else quoted(text)


def quoted(value: str) -> str:
    """Return a text in quotes of Hydra's grammar.

    In such quotes a backslash escapes only a quote. So only backslashes before a quote and at the end of the
    text are doubled.
    """
    inner = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + (match[2] and '\\"'), value)
    return f'"{inner}"'


def literal(word: str, keys: Collection[str] = ()) -> str:
    """Return a word in quotes of Hydra's grammar, in which OmegaConf does not replace `${x}`.

    Args:
        word: the word as typed.
        keys: keys to which the word may refer; OmegaConf replaces `${KEY}` by the value of such a key.
    """

    def escaped(match: re.Match[str]) -> str:
        escape = "" if match[3] in keys else "\\"
        return match[1] * 2 + escape + match[2]

    return quoted(re.sub(r"(\\*)(\$\{(?:([\w.]+)\})?)", escaped, word))


def _without_escapes(word: str) -> str:
    """Undo the escapes of `${` in a text that `literal` has written, after its quotes were removed."""
    return re.sub(r"(\\*)\\\$\{", lambda match: match[1][::2] + "${", word)
