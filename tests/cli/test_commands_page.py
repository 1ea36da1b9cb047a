"""`docs/reference/commands.md` is written from the parsers of the commands, as `--help` is.

Run with SLURMDDP_REWRITE_GOLDEN=1 to write the page again.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from collections.abc import Iterator

from slurmddp.cli.main import COMMANDS
from slurmddp.cli.messages import EXIT_CODES_HELP
from support import ROOT
from support.wrapping import CELL, wrap, wrap_item

PAGE = ROOT / "docs" / "reference" / "commands.md"
HEAD = """# Commands

This page is generated from the parsers of the commands: `slurmddp COMMAND --help` prints the same.
`slurmddp --debug COMMAND` prints the traceback of an error. [Configuration](configuration.md) lists
the settings (`key=value`), and [exit codes](exit-codes.md) what the codes mean.

Type the commands that start a run (`train`, `run`, `controller`, `bench`) in the folder of your
project, and all other commands in any folder. RUN is the name of a run, the beginning of a name, or
the path of a run folder.
"""

_CODE = re.compile(r"(?<![\w/])[\w./+-]*(?:[_=]|--\w)[\w./+=,:-]*(?<![.,:])")
"""A setting, a flag, or a name with an underscore."""


def parser_of(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"slurmddp.cli.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"slurmddp {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def page() -> str:
    """Return the text of `docs/reference/commands.md`."""
    rows = [f"| [{name}](#{name}) | {text} |" for name, text in COMMANDS.items()]
    sections = [HEAD, "\n".join(["| command | what it does |", "|---|---|", *rows, ""])]
    for name in COMMANDS:
        sections += [f"## {name}\n", *section(parser_of(name))]
        for title, parser in actions_of(parser_of(name)):
            sections += [f"### {name} {title}\n", *section(parser)]
    return "\n".join(sections)


def section(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the usage, the description, and the tables of arguments and flags of a parser."""
    text = parser.description or ""
    yield f"```text\n{usage(parser)}\n```\n"
    yield from paragraphs(text[:1].upper() + text[1:])
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    arguments = [(name_of(action), help_of(parser, action)) for action in shown if not action.option_strings]
    flags = [(name_of(action), help_of(parser, action)) for action in shown if action.option_strings]
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            arguments = [(choice.dest, choice.help or "") for choice in action._choices_actions]
    yield from table("argument", arguments)
    yield from table("flag", [row for row in flags if "--help" not in row[0]])
    yield from paragraphs((parser.epilog or "").partition("settings, with their defaults")[0])


def actions_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help for choice in action._choices_actions}
            for name, sub in action.choices.items():
                sub.description = sub.description or f"{texts[name]}."
                yield name, sub


def usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return re.sub(r"\n +", "\n", parser.usage.replace("%(prog)s", parser.prog))

    words = [parser.prog]
    if any("--help" not in action.option_strings for action in parser._actions if action.option_strings):
        words.append("[flags]")
    for action in parser._actions:
        if not action.option_strings:
            word = name_of(action)
            optional = {"?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}
            words.append(optional.get(str(action.nargs), word))
    return " ".join(words)


def name_of(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    if "|" in value:  # In a table it would begin a cell.
        value = "{" + value.replace("|", ",") + "}"
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {**vars(action), "prog": parser.prog}
    if action.choices is not None:
        values["choices"] = ", ".join(map(str, action.choices))
    text = " ".join(((action.help or "") % values).split())
    return text.replace("listed below", "see [configuration](configuration.md)")


def table(kind: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a table of names and meanings, or a list if a meaning is too long for a table."""
    if not rows:
        return

    if any(len(text) > CELL for _, text in rows):
        yield "\n".join([*(wrap_item(f"`{name}`: {marked(text)}") for name, text in rows), ""])
        return

    lines = [f"| `{name}` | {marked(text)} |" for name, text in rows]
    yield "\n".join([f"| {kind} | meaning |", "|---|---|", *lines, ""])


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; examples and tables stay as they are, exit codes are left out."""
    for paragraph in text.replace(EXIT_CODES_HELP, "").split("\n\n"):
        block = inspect.cleandoc(f"\n{paragraph}")
        is_example = re.match(r"(slurmddp |eval )", block) or re.search(r"\S  +\S", block)
        if is_example:
            yield f"```text\n{block}\n```\n"
        elif block:
            yield wrap(marked(block)) + "\n"


def marked(text: str) -> str:
    """Return a text in which settings and flags are marked as code, beside what is marked already."""
    parts = text.split("`")
    parts[::2] = [_CODE.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def test_the_page_is_written_from_the_parsers() -> None:
    text = page()
    if os.environ.get("SLURMDDP_REWRITE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run the test with SLURMDDP_REWRITE_GOLDEN=1"
