"""The files for coding agents name files, commands, states and exit codes that exist."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from slurmddp.cli.commands import run
from slurmddp.cli.main import COMMANDS
from slurmddp.errors import EXIT_CODES
from slurmddp.mcp_server.tools import TOOLS
from slurmddp.runs.text_format import STATE_STYLES
from slurmddp.settings.keys import GROUPS
from support import ROOT

LLMS = (ROOT / "llms.txt").read_text()
AGENT = ROOT / "templates/agent"
SKILL = AGENT / "agents/skills/slurmddp/SKILL.md"
FILES = [ROOT / "AGENTS.md", AGENT / "AGENTS.md", SKILL, ROOT / "llms.txt", ROOT / "docs/guides/agents.md"]


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of slurmddp in a text, in code blocks and between backquotes."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(
        r"`(slurmddp [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    words = [shlex.split(line, comments=True) for line in lines]
    return [parts[1:] for parts in words if parts[:1] == ["slurmddp"] and len(parts) > 1]


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_command_and_flag_exists(file: Path) -> None:
    shown = commands(file.read_text())
    for name, *words in shown:
        # Words in capitals and dots stand for what the reader types.
        if name == "COMMAND" or name == "...":
            continue
        assert name in COMMANDS, (file, name)
        parser = argparse.ArgumentParser(exit_on_error=False)
        module = importlib.import_module(f"slurmddp.cli.commands.{name}")
        module.add_arguments(parser)
        given = run.split(words)[0] if name == "run" else words
        try:
            _, rest = parser.parse_known_intermixed_args([word for word in given if word != "..."])
        except TypeError:
            _, rest = parser.parse_known_args(given)
        assert not rest, (file, name, rest)
    assert shown or file.name == "AGENTS.md"


def test_the_links_of_llms_txt_lead_somewhere() -> None:
    """The page follows llmstxt.org: a title, a summary, and lists of links below second-level headings."""
    title, blank, summary, *_ = LLMS.splitlines()
    assert title == "# slurmddp" and blank == "" and summary.startswith("> ")
    _, *sections = re.split(r"^## ", LLMS, flags=re.MULTILINE)
    items = [line for section in sections for line in section.splitlines()[1:] if line]
    links = [re.fullmatch(r"- \[[^\]]+\]\(([^)#]+)\): .+", item) for item in items]
    assert len(links) > 10 and all(links), items
    targets = [link[1] for link in links if link is not None]
    assert [target for target in targets if not (ROOT / target).is_file()] == []
    assert len(set(targets)) == len(targets)


def test_the_skill_is_found_by_its_front_matter() -> None:
    _, matter, text = SKILL.read_text().split("---\n", 2)
    facts = yaml.safe_load(matter)
    assert set(facts) == {"name", "description"}
    assert facts["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", facts["name"])
    assert 0 < len(facts["description"]) <= 1024
    assert len(text.splitlines()) < 500


def test_the_skill_names_every_state_exit_code_and_group_folder() -> None:
    text = SKILL.read_text()
    (states,) = re.findall(r"^States: (.*?)\.$", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"`(\w+)`", states) == list(STATE_STYLES)
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)] == list(EXIT_CODES)
    assert {"model", "data", "optimizer"} <= set(GROUPS)


def test_the_page_names_every_tool_and_what_it_needs() -> None:
    page = (ROOT / "docs/guides/agents.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|[^|]+\| (yes|no) \|$", page, flags=re.MULTILINE)
    named = {name: needs == "yes" for names, needs in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {name: tool.writes for name, tool in TOOLS.items()}


def test_files_in_agents_md_exist() -> None:
    named = re.findall(r"`((?:slurmddp|templates|tests|docs)/[\w./-]*)`", (ROOT / "AGENTS.md").read_text())
    assert len(named) > 10
    assert [
        name for name in named if not (ROOT / name).exists() and not name.isupper() and "ROOM" not in name
    ] == []
