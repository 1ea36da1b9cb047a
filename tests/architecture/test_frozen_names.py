"""The flags that people type: each change stands in this list. `docs/configuration.md` lists the keys."""

from __future__ import annotations

import argparse
import re
from importlib import import_module

from slurmddp.cli.main import COMMANDS
from support import ROOT

FLAGS = {
    "train": "--cfg --dry-run --fresh overrides",
    "run": "--cfg --dry-run --fresh --ranks --torchrun -m overrides",
    "exec": "--nodes --ranks",
    "controller": "--cfg --dry-run --fresh --ranks overrides",
    "list": "--all --json --limit",
    "status": "--json --verbose run",
    "logs": "--all --attempt --follow --lines --rank run",
    "stop": "run",
    "cancel": "run",
    "resume": "changes run",
    "checkpoints": "--json --verify run",
    "export": "--best --force --object --output --step run",
    "report": "run",
    "bench": "--batch --cfg --dry-run --fresh --layers --ranks --repetitions --seed --sizes --warmup --width "
    "action words",
    "sandbox": "action",
}

SANDBOX = {
    "up": "--accounting --cpus --dir --gpus --grace --link-mbit --name --no-namespaces --nodes "
    "--slurmd-timeout",
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
    described = (ROOT / "docs" / "data.md").read_text()
    assert [name for name in DATA.split() if f"`{name}" not in described] == []


def test_commands_and_their_flags() -> None:
    assert {command: names(parser_of(command)) for command in COMMANDS} == FLAGS


def test_the_flags_of_the_sandbox() -> None:
    (choices,) = [action.choices for action in parser_of("sandbox")._actions if action.choices]
    assert {verb: names(parser) for verb, parser in choices.items()} == SANDBOX


def test_one_table_names_the_environment_variables() -> None:
    package = ROOT / "slurmddp"
    table = package / "environments" / "names.py"
    files = [path for path in package.rglob("*.py") if path != table]
    assert [path.name for path in files if re.search(r'"SLURMDDP_[A-Z_]+"', path.read_text())] == []
    names = re.findall(r'^[A-Z_]+_VARIABLE = "(SLURMDDP_[A-Z_]+)"\n"""\S', table.read_text(), re.MULTILINE)
    assert len(names) == len(set(names)) == table.read_text().count("SLURMDDP_")
