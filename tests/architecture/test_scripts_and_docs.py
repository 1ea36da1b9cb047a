"""Every link leads somewhere, every shell block parses, every command in the docs exists."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slurmddp.cli.commands import run
from slurmddp.cli.main import COMMANDS
from slurmddp.config.composition.compose import compose
from slurmddp.config.composition.search_space import is_search, read
from slurmddp.config.composition.sources import DEFAULT
from slurmddp.config.composition.sweep import points
from slurmddp.config.job import build_job
from support import ROOT

DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCS += sorted((ROOT / "examples").rglob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def fenced(text: str, languages: set[str]) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [body for language, body in blocks if language in languages]


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
def test_t15_shell_blocks_parse(doc: Path) -> None:
    for block in fenced(doc.read_text(), {"bash", "sh", "shell"}):
        result = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert result.returncode == 0, f"{doc.name}: {result.stderr}\n{block}"


def shell_lines() -> list[list[str]]:
    """Return the arguments of each shell line in the docs."""
    blocks = [block for doc in DOCS for block in fenced(doc.read_text(), {"bash", "sh", "shell"})]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_commands_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    made = {words[1] for words in shell_lines() if words[0] == "make"}
    assert {"train", "test"} <= made <= targets
    used = {words[1] for words in shell_lines() if Path(words[0]).name == "slurmddp" and words[1][0] != "-"}
    assert "train" in used and used <= set(COMMANDS)


def test_train_lines_in_the_docs_compose(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "sockets.py").symlink_to(ROOT / "examples" / "13_own_transport" / "sockets.py")
    shown = [words[2:] for words in shell_lines() if words[:2] == ["slurmddp", "train"]]
    # Some lines name a cluster or code that only the reader has.
    known = [words for words in shown if not re.search(r"\+cluster=mine|my_|<", " ".join(words))]
    for words in known:
        settings = [word for word in words if not word.startswith("-")]
        if is_search(settings):
            settings = read(settings, tmp_path, DEFAULT).edges()[0]
        for overrides in points(settings, tmp_path, DEFAULT) if "-m" in words else [settings]:
            build_job(compose(overrides, tmp_path), project_dir=tmp_path, overrides=overrides)
    assert len(known) >= 3, "the docs show how to train"


def test_run_lines_in_the_docs_parse() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    run.add_arguments(parser)
    shown = [words[2:] for words in shell_lines() if words[:2] == ["slurmddp", "run"]]
    for words in shown:
        flags, program = run.split(words)
        assert program and not parser.parse_known_intermixed_args(flags)[1], words
    assert len(shown) >= 3, "the docs show how to run a script"
