"""`docs/reference/api.md` is written from the docstrings of the API, and these say all that a caller needs.

Run with SLURMDDP_REWRITE_GOLDEN=1 to write the page again.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from slurmddp.settings.schema import KEEP_LAST
from support import ROOT
from support.wrapping import CELL, COLUMNS, linked, wrap, wrap_item

PAGE = ROOT / "docs" / "reference" / "api.md"
HEAD = """# The API

This page is generated from the docstrings of `slurmddp/training/distributon.py` and
`slurmddp/training/data/distributed_loader.py`. [own-loop](../guides/own-loop.md) shows the
calls in whole programs. Pass the parameters before `/` by position, and the parameters after `*` by
name. The errors are classes of `slurmddp.errors`.

"""
SECTIONS = ("Args", "Returns", "Raises", "Example")
_GROUP = re.compile(r"    # ([A-Z][^.]*)\.")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):\n", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


@dataclass(frozen=True)
class Member:
    """One member of the API, with its docstring in parts."""

    name: str
    group: str
    node: ast.FunctionDef
    is_property: bool = False

    @property
    def title(self) -> str:
        """The heading: `launch`, or `len(loader)` for a method that Python calls."""
        return {"__len__": "len(loader)", "__iter__": "for batch in loader"}.get(self.name, self.name)

    @property
    def signature(self) -> str:
        inner = re.sub(r"^self(, )?", "", ast.unparse(self.node.args)).removeprefix("/, ")
        inner = inner.replace("=KEEP_LAST", f"={KEEP_LAST}")
        result = ast.unparse(self.node.returns) if self.node.returns else "None"
        line = f"{self.name}({inner})" + (f" -> {result}" if self.node.name != "__init__" else "")
        return line if len(line) <= COLUMNS else one_parameter_a_line(line)

    @property
    def parts(self) -> dict[str, str]:
        return parts_of(ast.get_docstring(self.node) or "")

    @property
    def parameters(self) -> set[str]:
        given = self.node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {one.arg for one in named if one is not None} - {"self"}


def one_parameter_a_line(signature: str) -> str:
    """Return a signature as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(COLUMNS), "-"]
    code = f"def {signature}: ..."
    formatted = subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout
    return formatted.strip().removeprefix("def ").removesuffix(": ...")


def parts_of(docstring: str) -> dict[str, str]:
    """Return the description, under an empty name, and the sections of a docstring."""
    first, *rest = _SECTION.split(linked(docstring))
    bodies = [inspect.cleandoc("\n" + body) for body in rest[1::2]]
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def entries(body: str) -> dict[str, str]:
    """Return the entries `name: text` of a section; the lines of one text are joined."""
    first, *rest = _ENTRY.split(body)
    assert not first.strip(), f"not an entry: {first!r}"
    texts = [re.sub(r"\s+", " ", text).strip() for text in rest[1::2]]
    return dict(zip(rest[::2], texts, strict=True))


def members(path: str, name: str) -> tuple[ast.ClassDef, list[Member]]:
    """Return a class and its public members, each with the comment that stands over its group."""
    text = (ROOT / "slurmddp" / path).read_text()
    lines = text.splitlines()
    [cls] = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name]
    found = []
    for node in cls.body:
        decorators = {ast.unparse(one) for one in getattr(node, "decorator_list", ())}
        if not isinstance(node, ast.FunctionDef) or "overload" in decorators:
            continue
        over = [match[1] for line in lines[cls.lineno : node.lineno] if (match := _GROUP.fullmatch(line))]
        if not node.name.startswith("_") or node.name in ("__len__", "__iter__"):
            found.append(Member(node.name, over[-1] if over else "", node, "property" in decorators))
    return cls, found


CLASS, METHODS = members("training/distributon.py", "Distributon")
LOADER, LOADERS = members("training/data/distributed_loader.py", "DistributedLoader")
# Its other methods serve save and load.
LOADERS = [one for one in LOADERS if one.is_property or one.name.startswith("__")]
CONSTRUCTOR = next(one for one in CLASS.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")


def page() -> str:
    """Return the text of `docs/reference/api.md`."""
    constructor = Member("Distributon", "", CONSTRUCTOR)
    lines = [HEAD + "## Distributon\n", *body(constructor, parts_of(ast.get_docstring(CLASS) or ""))]
    group = ""
    for one in METHODS:
        if one.group != group:
            group = one.group
            lines += [f"## {group}\n"]
        lines += [f"### {one.title}\n", *body(one, one.parts)]
    lines += ["## The loader\n", *described(parts_of(ast.get_docstring(LOADER) or ""))]
    for one in LOADERS:
        lines += [f"### {one.title}\n", *body(one, one.parts)]
    return "\n".join(lines).rstrip() + "\n"


def body(one: Member, parts: dict[str, str]) -> Iterator[str]:
    if one.is_property:
        returns = ast.unparse(one.node.returns) if one.node.returns else ""
        yield f"`{one.name}: {returns}`\n"
    elif not one.name.startswith("__"):
        yield f"```text\n{one.signature}\n```\n"
    yield from described(parts)


def described(parts: dict[str, str]) -> Iterator[str]:
    yield wrap(parts[""]) + "\n"
    if "Args" in parts:
        yield table_or_list("argument", "meaning", entries(parts["Args"]))
    if "Returns" in parts:
        yield wrap(f"Returns: {parts['Returns']}") + "\n"
    if "Raises" in parts:
        yield table_or_list("raises", "if", entries(parts["Raises"]))
    if "Example" in parts:
        yield f"```python\n{parts['Example']}\n```\n"


def table_or_list(name_head: str, text_head: str, texts: dict[str, str]) -> str:
    """Return a table of named texts, or a list if a text is too long for a table."""
    if any(len(text) > CELL for text in texts.values()):
        return "\n".join([*(wrap_item(f"`{name}`: {text}") for name, text in texts.items()), ""])

    rows = [f"| `{name}` | {cell(text)} |" for name, text in texts.items()]
    return "\n".join([f"| {name_head} | {text_head} |", "|---|---|", *rows, ""])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def test_the_page_of_the_api_is_what_the_docstrings_say() -> None:
    if os.environ.get("SLURMDDP_REWRITE_GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run the test with SLURMDDP_REWRITE_GOLDEN=1"


@pytest.mark.parametrize("one", [*METHODS, *LOADERS], ids=lambda one: one.name)
def test_a_docstring_of_the_api_says_all_that_a_caller_needs(one: Member) -> None:
    parts = one.parts
    assert parts[""], "a description"
    described = {name.lstrip("*") for names in entries(parts.get("Args", "")) for name in names.split(", ")}
    assert described == one.parameters, "Args name the parameters"
    returns = ast.unparse(one.node.returns) if one.node.returns else "None"
    is_context = any("contextmanager" in ast.unparse(each) for each in one.node.decorator_list)
    has_result = returns not in ("None", "NoReturn") and not is_context and not one.name.startswith("__")
    assert ("Returns" in parts) == (has_result and not one.is_property)
    calls = [each.exc for each in ast.walk(one.node) if isinstance(each, ast.Raise)]
    raised = {one.func.id for one in calls if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    told = ", ".join(entries(parts.get("Raises", ""))).split(", ")
    assert raised - {"NotImplementedError"} <= set(told), "Raises name what the body raises"
    assert "Example" in parts or not one.parameters, "a method with arguments has an example"
    compile(parts.get("Example", ""), one.name, "exec")


def test_the_arguments_of_the_class_are_those_of_its_constructor() -> None:
    parts = parts_of(ast.get_docstring(CLASS) or "")
    assert list(entries(parts["Args"])) == [
        one.arg for one in [*CONSTRUCTOR.args.args[1:], *CONSTRUCTOR.args.kwonlyargs]
    ]


def test_every_member_stands_in_a_group() -> None:
    groups = list(dict.fromkeys(one.group for one in METHODS))
    assert groups[:2] == ["Start and end of the training", "Rank, node and device of this process"]
    assert len(groups) >= 6 and all(groups)


def test_the_parts_of_a_docstring_are_found() -> None:
    found = parts_of(
        "Do it.\n\nMore.\n\nArgs:\n    a: one\n        more.\n    b, c: two.\n\nReturns:\n    x\n"
    )
    assert found == {"": "Do it.\n\nMore.", "Args": "a: one\n    more.\nb, c: two.", "Returns": "x"}
    assert entries(found["Args"]) == {"a": "one more.", "b, c": "two."}
