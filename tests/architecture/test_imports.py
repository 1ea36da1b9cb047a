"""The modules that the command line imports: few, and never torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs.projects import make_project

# Modules that `slurmddp --help` may load besides those of a bare interpreter.
HELP_MAY_LOAD = {
    "slurmddp", "__future__", "argparse", "collections", "contextlib", "copy", "copyreg", "difflib", "enum",
    "errno", "functools", "gettext", "heapq", "importlib", "itertools", "keyword", "linecache", "locale",
    "operator", "re", "reprlib", "shutil", "string", "struct", "textwrap", "token", "tokenize", "traceback",
    "types", "typing", "warnings", "weakref", "weakrefset",
    # What newer interpreters load for argparse and traceback.
    "bz2", "codeop", "colorize", "fnmatch", "lzma", "threading", "zlib", "ast",
}  # fmt: skip
# Distributions that a dry run may load.
DRY_RUN_MAY_LOAD = {
    "slurmddp",
    "hydra",
    "omegaconf",
    "antlr4",
    "yaml",
    "jinja2",
    "markupsafe",
    "packaging",
} | {
    "attr"  # omegaconf imports it where it is installed.
}

_PROBE = """
import json, sys
before = set(sys.modules)
{code}
loaded = sorted(set(sys.modules) - before)
print(json.dumps([[name, getattr(sys.modules[name], "__file__", None)] for name in loaded]), file=sys.stderr)
"""


def loaded(code: str, folder: Path) -> dict[str, str | None]:
    # -S -E are not used: what `site` loads is the same with and without us.
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(code=code)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code", ["import slurmddp.cli.main", "from slurmddp.cli.main import main; main(['--help'])"]
)
def test_help_loads_the_standard_library_only(code: str, tmp_path: Path) -> None:
    tops = {name.partition(".")[0].lstrip("_") for name in loaded(code, tmp_path)}
    # The finder of an editable installation is not ours.
    tops = {name for name in tops if not name.startswith("editable")}
    assert tops <= HELP_MAY_LOAD | {name.lstrip("_") for name in HELP_MAY_LOAD}


def test_a_dry_run_needs_neither_torch_nor_rich(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    command = ["train", "--dry-run", "+cluster=big", "nodes=3"]
    code = f"from slurmddp.cli.main import main; assert main({command}) == 0"
    found = loaded(code, project)
    installed = {
        name.partition(".")[0]
        for name, file in found.items()
        if file and "site-packages" in file and not name.startswith(("_", "__editable"))
    }
    assert installed <= DRY_RUN_MAY_LOAD
    assert not {"torch", "numpy", "matplotlib", "submitit", "rich"} & {
        name.partition(".")[0] for name in found
    }
    assert not [name for name in found if name.startswith(("slurmddp.training", "slurmddp.checkpoint"))]


def test_a_dry_run_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from slurmddp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "train", "--dry-run"]
    here = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert "slurmddp.launchers.agent" in here.stdout
    there = subprocess.run(
        [*command, "+cluster=big"], cwd=project, capture_output=True, text=True, check=True
    )
    assert there.stdout.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("name", ["train", "list", "status", "logs", "cancel", "resume", "report", "sandbox"])
def test_no_command_imports_torch_to_show_its_help(name: str, tmp_path: Path) -> None:
    found = loaded(f"from slurmddp.cli.main import main; assert main([{name!r}, '--help']) == 0", tmp_path)
    assert not {"torch", "hydra", "rich", "submitit", "matplotlib"} & {
        module.partition(".")[0] for module in found
    }
