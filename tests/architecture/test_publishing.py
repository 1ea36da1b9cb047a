"""Workflows, templates and metadata of a release are valid, and agree with the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import slurmddp
from support import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))


def lines_of_workflow(path: Path) -> list[str]:
    """Return the shell lines of all steps of a workflow."""
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("dependabot", [FORGE / "dependabot.yml"]),
        ("github-issue-forms", sorted((FORGE / "ISSUE_TEMPLATE").glob("[!c]*.yml"))),
        ("github-issue-config", [FORGE / "ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_the_forge_follow_their_schemas(schema: str, files: list[Path]) -> None:
    assert files
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        f"--builtin-schema=vendor.{schema}",
        *map(str, files),
    ]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_linter_for_workflows_finds_nothing() -> None:
    """zizmor looks for secrets that leak, actions that are not pinned, and permissions that are too wide."""
    linter = Path(sys.executable).with_name("zizmor")
    linted = subprocess.run([linter, "--offline", "--quiet", FORGE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_workflows_call_verbs_of_the_makefile() -> None:
    verbs = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.M))
    called = {
        verb
        for path in WORKFLOWS
        for line in lines_of_workflow(path)
        for verb in re.findall(r"make (\w+)", line)
    }
    nightly = yaml.safe_load((FORGE / "workflows/nightly.yml").read_text())
    commands = nightly["jobs"]["suite"]["strategy"]["matrix"]["command"]
    called |= {command.split()[1] for command in commands if command.startswith("make ")}
    assert called >= {"check", "dist", "matrix"}
    assert called <= verbs
    assert [command for command in commands if not command.startswith("make ")] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_each_supported_python_is_checked() -> None:
    workflow = yaml.safe_load((FORGE / "workflows/check.yml").read_text())
    checked = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert checked == [f"3.{minor}" for minor in range(int(first), int(end))]


def test_the_version_stands_in_one_place_and_its_copies_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "slurmddp.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == slurmddp.__version__
    assert re.search(
        rf"^## {re.escape(slurmddp.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), flags=re.M
    )


@pytest.mark.parametrize(
    ("tag", "code"), [(f"v{slurmddp.__version__}", 0), ("v9.9.9", 2), (slurmddp.__version__, 2)]
)
def test_a_release_needs_the_tag_of_its_version(tag: str, code: int) -> None:
    command = ["make", "--no-print-directory", "release-tag", f"TAG={tag}", f"PYTHON={sys.executable}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == code, made.stdout + made.stderr
    if code:
        assert f"The tag {tag} is not v{slurmddp.__version__}" in made.stderr


def test_the_licence_is_the_one_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
