"""Every script parses, every link leads somewhere, every command in the docs exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support import ROOT

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCS += sorted((ROOT / "examples").rglob("*.md"))
SCRIPTS = [
    *sorted(ROOT.glob("tests/golden/*.sbatch")),
    *sorted(ROOT.glob("slurmddp/templates/*.sh.j2")),
    *sorted(ROOT.glob(".ci/*")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def fenced(text: str, languages: set[str]) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [body for language, body in blocks if language in languages]


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_parses(script: Path) -> None:
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_no_test_is_skipped() -> None:
    skip = re.compile(r"\b(?:mark\.skip|skipif|pytest\.skip|importorskip|SkipTest)\b")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert [path.name for path in files if skip.search(path.read_text())] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(doc: Path) -> None:
    text = doc.read_text()
    for link in LINK.findall(text):
        if re.match(r"https?://|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (doc.parent / target) if target else doc
        assert file.exists(), f"{doc.name} links to {link}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{doc.name} links to {link}: no such heading"


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_blocks_parse(doc: Path) -> None:
    for block in fenced(doc.read_text(), {"bash", "sh", "shell"}):
        result = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert result.returncode == 0, f"{doc.name}: {result.stderr}\n{block}"


def shell_lines() -> list[tuple[str, str]]:
    lines = []
    for doc in DOCS:
        for block in fenced(doc.read_text(), {"bash", "sh", "shell"}):
            joined = block.replace("\\\n", " ")
            lines += [(doc.name, line.strip()) for line in joined.splitlines()]
    return lines


def test_make_verbs_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = {line.split()[1] for _, line in shell_lines() if re.match(r"make [a-z]", line)}
    assert "train" in used
    assert "test" in used
    assert used <= targets


def test_slurmddp_commands_in_the_docs_exist() -> None:
    from slurmddp.cli.main import COMMANDS

    used = {m.group(1) for _, line in shell_lines() if (m := re.match(r"(?:\S*/)?slurmddp ([a-z]+)", line))}
    assert "train" in used
    assert used <= set(COMMANDS)


def test_train_lines_in_the_docs_compose(tmp_path: Path) -> None:
    import shlex

    from slurmddp.config.compose import compose
    from slurmddp.config.job import build_job

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    seen = 0
    for _, line in shell_lines():
        words = shlex.split(line, comments=True)
        if words[:2] != ["slurmddp", "train"]:
            continue
        overrides = [word for word in words[2:] if not word.startswith("--")]
        if any(part in line for part in ("+cluster=mine", "my_", "<")):
            continue
        build_job(compose(overrides, tmp_path), project_dir=tmp_path, overrides=overrides)
        seen += 1
    assert seen >= 3, "the docs show how to train"


def test_run_lines_in_the_docs_parse() -> None:
    import argparse
    import shlex

    from slurmddp.cli.commands import run

    parser = argparse.ArgumentParser(exit_on_error=False)
    run.add_arguments(parser)
    seen = 0
    for _, line in shell_lines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["slurmddp", "run"]:
            own, program = run.split(words[2:])
            assert not parser.parse_known_intermixed_args(own)[1], line
            assert program, line
            seen += 1
    assert seen >= 3, "the docs show how to run a script"


def test_make_needs_nothing_unusual() -> None:
    assert shutil.which("make"), "the tests are started by make"
