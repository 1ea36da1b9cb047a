"""The flags that people type are listed here, so that no change goes unnoticed.

`docs/reference/configuration.md` lists the keys of the configuration.
"""

from __future__ import annotations

import argparse
import re
from importlib import import_module

import pytest

from slurmddp.cli.main import COMMANDS
from support import ROOT

FLAGS = {
    "init": "--agent folder",
    "train": "--again --cfg --check --config-dir --config-name --config-path --dry-run --info --json "
    "--multirun --package --resolve overrides",
    "run": "--again --cfg --check --config-dir --config-name --config-path --dry-run --info --json "
    "--launcher --multirun --package --ranks --resolve -m overrides",
    "exec": "--nodes --ranks",
    "controller": "--again --cfg --check --config-dir --config-name --config-path --dry-run --info --package "
    "--ranks --resolve overrides",
    "list": "--all --json --limit --name --state --watch sweep",
    "status": "--json --verbose run",
    "explain": "--json run",
    "logs": "--all --attempt --follow --json --lines --node --rank run",
    "stop": "--json run",
    "cancel": "--json run",
    "resume": "--check --json changes run",
    "checkpoints": "--json --verify run",
    "rerun": "--again --cfg --check --config-dir --config-name --config-path --dry-run --info --json "
    "--package --resolve changes run",
    "diff": "--json first second",
    "rm": "--json --yes run",
    "export": "--best --force --json --object --output --step run",
    "report": "--json run",
    "open": "--folder run",
    "cluster": "action",
    "bench": "--again --batch --cfg --check --config-dir --config-name --config-path --dry-run --info "
    "--layers --package --ranks --repetitions --resolve --seed --sizes --warmup --width action words",
    "completion": "shell",
    "mcp": "--write folder",
    "sandbox": "action",
}

CLUSTER = {"detect": "--write partitions", "check": "--files --json names"}

SANDBOX = {
    "up": "--accounting --cpus --dir --folder --gpus --grace --link-mbit --mount-options --name "
    "--no-namespaces --nodes --shared --slurmd-timeout",
    "down": "--dir --name",
    "status": "--dir --name",
    "env": "--dir --name --unset",
}


DATA = (
    "__len__ __getitem__ __getitems__ __iter__ set_share set_epoch state_dict load_state_dict sample_weights "
    "deterministic heldout tokens_per_sample encode decode"
)


def names(parser: argparse.ArgumentParser) -> str:
    found = set()
    for action in parser._actions:
        longest = max(action.option_strings, key=len) if action.option_strings else action.dest
        found.add(longest)
    return " ".join(sorted(found - {"--help"}))


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    import_module(f"slurmddp.cli.commands.{command}").add_arguments(parser)
    return parser


def test_the_docs_describe_all_names_that_a_data_set_may_have() -> None:
    described = (ROOT / "docs" / "guides" / "data.md").read_text()
    assert [name for name in DATA.split() if f"`{name}" not in described] == []


def test_commands_and_their_flags() -> None:
    assert {command: names(parser_of(command)) for command in COMMANDS} == FLAGS


@pytest.mark.parametrize(("command", "flags"), [("sandbox", SANDBOX), ("cluster", CLUSTER)])
def test_the_flags_of_actions(command: str, flags: dict[str, str]) -> None:
    (choices,) = [action.choices for action in parser_of(command)._actions if action.choices]
    assert {verb: names(parser) for verb, parser in choices.items()} == flags


def test_one_table_names_the_environment_variables() -> None:
    package = ROOT / "slurmddp"
    table = package / "environments" / "names.py"
    # Modules of this folder can't import the table.
    startup = package / "launchers" / "agent" / "startup"
    files = [path for path in package.rglob("*.py") if path != table and startup not in path.parents]
    assert [path.name for path in files if re.search(r'"SLURMDDP_[A-Z_]+"', path.read_text())] == []
    names = re.findall(r'^[A-Z_]+_VARIABLE = "(SLURMDDP_[A-Z_]+)"\n"""\S', table.read_text(), re.MULTILINE)
    assert len(names) == len(set(names)) == table.read_text().count("SLURMDDP_")
