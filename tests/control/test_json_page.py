"""`docs/reference/json.md` is written from the dataclasses of results, and names every command with `--json`.

Run with SLURMDDP_REWRITE_GOLDEN=1 to write the page again.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from slurmddp.cli.main import COMMANDS
from slurmddp.control.cancel import cancel
from slurmddp.control.check import check, check_clusters
from slurmddp.control.checkpoints import checkpoints
from slurmddp.control.diff import diff
from slurmddp.control.explain import explain
from slurmddp.control.export import export
from slurmddp.control.json_encoding import VERSION
from slurmddp.control.listing import list_runs
from slurmddp.control.logs import logs
from slurmddp.control.plan import plan
from slurmddp.control.remove import remove
from slurmddp.control.report import report
from slurmddp.control.resume import resume
from slurmddp.control.search import search_best
from slurmddp.control.start import start
from slurmddp.control.status import status
from slurmddp.control.stop import stop
from slurmddp.settings.spec import Job
from support import ROOT
from support.wrapping import CELL, wrap, wrap_item

PAGE = ROOT / "docs" / "reference" / "json.md"
SEARCH = "train -m hydra/sweeper=optuna"
DRY_RUN = "train --dry-run"
CHECK = "train --check"
ACTIONS: dict[str, Callable[..., Any]] = {
    "train": start,
    SEARCH: search_best,
    DRY_RUN: plan,
    CHECK: check,
    "run": start,
    "rerun": start,
    "resume": resume,
    "status": status,
    "list": list_runs,
    "explain": explain,
    "logs": logs,
    "diff": diff,
    "checkpoints": checkpoints,
    "export": export,
    "report": report,
    "stop": stop,
    "cancel": cancel,
    "rm": remove,
    "cluster check": check_clusters,
}
"""The function of each command with `--json`."""
HEAD = f"""# Results as JSON

This page is generated from the dataclasses of the results. With `--json` a command prints one JSON
document on its standard output. This document is the value that a function of `slurmddp.control`
returns to Python. Messages go to the standard error. After an error the exit code names the kind of
error (`slurmddp --help`).

```bash
slurmddp status first --json
slurmddp list --state failed --json
```

Each document is an object. Its first key is `version`, with the value {VERSION}. The version grows when a
key is removed or changes its meaning. New keys may be added without a new version. Times are in
seconds since the epoch. NaN and infinity become null.

## Commands
"""
_PLAIN = {str: "text", Path: "path", int: "integer", float: "number", bool: "true or false", Any: "any value"}


def page() -> str:
    """Return the text of `docs/reference/json.md`."""
    results = {
        command: list(leaves(typing.get_type_hints(ACTIONS[command], None, {"Job": Job})["return"]))
        for command in ACTIONS
    }
    links = {kinds[0]: f"[{command}](#{command})" for command, kinds in reversed(results.items())}
    sections = [HEAD]
    for command, action in ACTIONS.items():
        kind, *others = results[command]
        function = f"`{action.__module__}.{action.__name__}` returns `{kind.__name__}`."
        for other in others:
            function += f" For a sweep it returns the result of {links[other]}."
        sections.append(f"### {command}\n")
        if links[kind].startswith(f"[{command}]"):
            sections += [described(kind), f"{wrap(function)}\n", table(kind)]
        else:
            sections.append(f"The result of {links[kind]}.\n")

    sections.append("## Parts\n")
    parts = {part for kinds in results.values() for kind in kinds for part in used(kind)}
    for kind in sorted(parts, key=lambda part: part.__name__):
        sections += [f"### {kind.__name__}\n", described(kind), table(kind)]
    return "\n".join(sections)


def described(kind: type) -> str:
    """Return the first paragraph of a dataclass's docstring, and whose keys it has beside its own."""
    text, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    bases = [json_type(base) for base in kind.__bases__ if is_dataclass(base)]
    text += "".join(f" It has the keys of {base} as well." for base in bases)
    return wrap(in_json(text)) + "\n"


def table(kind: type) -> str:
    """Return a table of the fields that a dataclass declares, or a list if a text is too long for a table."""
    hints = typing.get_type_hints(kind)
    fields = [(name, json_type(hints[name]), text) for name, text in fields_of(kind).items()]
    if any(len(cell) > CELL for cells in fields for cell in cells):
        items = [f"`{name}`, {type_}: {text}".removesuffix(": ") for name, type_, text in fields]
        return "\n".join([*map(wrap_item, items), ""])

    rows = [f"| `{name}` | {type_} | {text} |" for name, type_, text in fields]
    return "\n".join(["| key | type | meaning |", "|---|---|---|", *rows, ""])


def fields_of(kind: type) -> dict[str, str]:
    """Return the fields that a dataclass declares itself, each with the text below it."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            texts[ast.unparse(statement.target)] = ""
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and texts:
            texts[list(texts)[-1]] = in_json(re.sub(r"\s+", " ", str(statement.value.value)))
    return texts


def in_json(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text).replace("|", "\\|")


def json_type(kind: Any) -> str:
    """Return how JSON has a value of a type, in words."""
    if is_dataclass(kind) and isinstance(kind, type):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    origin = typing.get_origin(kind)
    options = typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f'"{value}"' for value in options)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if option is type(None) else json_type(option) for option in options)
    if origin is tuple:
        return f"list of {json_type(options[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"object, by name: {json_type(options[1])}"
    return _PLAIN[kind]


def used(kind: type) -> Iterator[type]:
    """Yield the dataclasses in the fields of a dataclass, and its bases."""
    parts = [base for base in kind.__bases__ if is_dataclass(base)]
    for annotation in typing.get_type_hints(kind).values():
        parts += [part for part in leaves(annotation) if is_dataclass(part)]
    for part in parts:
        yield part
        yield from used(part)


def leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types of which an annotation is made."""
    options = typing.get_args(annotation)
    if options and typing.get_origin(annotation) is not typing.Literal:
        for option in options:
            yield from leaves(option)
    else:
        yield annotation


def test_the_page_is_what_the_dataclasses_say() -> None:
    if os.environ.get("SLURMDDP_REWRITE_GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run the test with SLURMDDP_REWRITE_GOLDEN=1"


def test_the_page_names_every_command_with_json() -> None:
    with_json = set()
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"slurmddp.cli.commands.{command}").add_arguments(parser)
        with_json |= {f"{command} {name}".strip() for name in commands_with_json(parser)}
    assert with_json == set(ACTIONS) - {SEARCH, DRY_RUN, CHECK}


def commands_with_json(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the sub-commands with `--json`; an empty name is the command itself."""
    for action in parser._actions:
        if "--json" in action.option_strings:
            yield ""
        if isinstance(action, argparse._SubParsersAction):
            yield from (name for name, inner in action.choices.items() if list(commands_with_json(inner)))
