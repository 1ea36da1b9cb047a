"""The command line imports few modules, and never torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from slurmddp.cli.main import COMMANDS
from support.runs.projects import make_project

# Modules that `slurmddp --help` may load, besides the modules of a bare interpreter.
HELP_MAY_LOAD = {
    "slurmddp", "__future__", "argparse", "collections", "contextlib", "copy", "copyreg", "difflib", "enum",
    "errno", "functools", "gettext", "heapq", "importlib", "itertools", "keyword", "linecache", "locale",
    "operator", "re", "reprlib", "shutil", "string", "struct", "textwrap", "token", "tokenize", "traceback",
    "types", "typing", "warnings", "weakref", "weakrefset",
    # Newer interpreters load these for argparse and traceback.
    "bz2", "codeop", "colorize", "fnmatch", "lzma", "threading", "zlib", "ast",
}  # fmt: skip
# Distributions that a dry run may load; omegaconf imports attr where it is installed.
DRY_RUN_MAY_LOAD = {
    "slurmddp",
    "hydra",
    "omegaconf",
    "antlr4",
    "yaml",
    "jinja2",
    "markupsafe",
    "packaging",
    "attr",
}

_PROBE = """
import json, sys
before = set(sys.modules)
{code}
loaded = sorted(set(sys.modules) - before)
print(json.dumps([[name, getattr(sys.modules[name], "__file__", None)] for name in loaded]), file=sys.stderr)
"""


def loaded(code: str, folder: Path) -> dict[str, str | None]:
    # The modules that `site` loads are in sys.modules before the code runs, so -S and -E are not needed.
    command = [sys.executable, "-c", _PROBE.format(code=code)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stderr.splitlines()[-1]))


def tops(names: Iterable[str]) -> set[str]:
    # An editable installation has a finder that is no part of slurmddp.
    found = {name.partition(".")[0].lstrip("_") for name in names}
    return {name for name in found if not name.startswith("editable")}


@pytest.mark.parametrize(
    "code", ["import slurmddp.cli.main", "from slurmddp.cli.main import main; main(['--help'])"]
)
def test_help_loads_the_standard_library_only(code: str, tmp_path: Path) -> None:
    assert tops(loaded(code, tmp_path)) <= tops(HELP_MAY_LOAD)


@pytest.mark.parametrize("where", [["+cluster=big", "nodes=3"], []], ids=["cluster", "here"])
def test_a_dry_run_needs_neither_torch_nor_rich(where: list[str], tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    code = f"from slurmddp.cli.main import main; assert main({['train', '--dry-run', *where]}) == 0"
    found = loaded(code, project)
    assert tops(name for name, file in found.items() if file and "site-packages" in file) <= DRY_RUN_MAY_LOAD
    assert not {"torch", "numpy", "matplotlib", "submitit", "rich"} & tops(found)
    assert not [name for name in found if name.startswith(("slurmddp.training", "slurmddp.checkpoint"))]


@pytest.mark.parametrize("words", [["list"], ["status"], ["list", "--name", "gpt"]])
def test_without_runs_over_ssh_a_list_needs_no_ssh_code(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    names = loaded(f"from slurmddp.cli.main import main; main({words})", tmp_path)
    assert "slurmddp.cli.commands.list" in names
    needless = ("slurmddp.control.ssh", "slurmddp.cli.over_ssh", "slurmddp.slurm.paced_client")
    assert [name for name in names if name.startswith(needless)] == []


def test_submission_never_imports_torch(tmp_path: Path) -> None:
    assert "torch" not in tops(loaded("import slurmddp.launchers.submit.submitit, submitit", tmp_path))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch_to_show_its_help(name: str, tmp_path: Path) -> None:
    found = loaded(f"from slurmddp.cli.main import main; assert main([{name!r}, '--help']) == 0", tmp_path)
    heavy = {"torch", "hydra", "rich", "submitit", "matplotlib", "jinja2", "numpy"}
    assert not heavy & tops(found)
