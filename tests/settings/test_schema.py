"""A key is described in one place: its field. Everything else follows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from slurmddp.settings.keys import GROUPS, TOP, Key, every_key
from slurmddp.settings.schema import Identity
from support import ROOT
from support.wrapping import linked

TABLE = re.compile(r"(?<=<!-- keys -->\n).*(?=<!-- end -->)", re.DOTALL)

# A program of a person who added the key `train.probes` to the schema.
PROGRAM = """
import json, sys
from pathlib import Path
from slurmddp.checkpoint.state.config_match import bound_to
from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.settings.schema import TrainSettings
from slurmddp.errors import ConfigError
from slurmddp.settings.check_values import read_section

def outcome_of(*arguments):
    try:
        return build_job(compose(arguments, Path.cwd()), project_dir=Path.cwd())
    except ConfigError as error:
        return str(error)

plain, other = outcome_of(), outcome_of("train.probes=8")
json.dump({
    "default": plain.program.config["train"]["probes"],
    "given": other.program.config["train"]["probes"],
    "names differ": plain.run_name != other.run_name,
    "bound": bound_to(other.program.config)["train"]["probes"],
    "trainer": read_section({"probes": 9}, TrainSettings, "train.").probes,
    "bounds": outcome_of("train.probes=0"),
    "near": outcome_of("train.probe=1"),
}, sys.stdout)
"""


def test_a_key_is_added_in_one_place(tmp_path: Path) -> None:
    package = tmp_path / "slurmddp"
    shutil.copytree(ROOT / "slurmddp", package, ignore=shutil.ignore_patterns("__pycache__"))
    schema = package / "settings" / "schema.py"
    before = schema.read_text()
    field = '    probes: int = key(7, "how often to probe", minimum=1)\n'
    schema.write_text(before.replace("    steps: int = key(", f"{field}    steps: int = key(", 1))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        ).stdout

    assert re.search(r"train\.probes +how often to probe \(7\)", run("-m", "slurmddp", "train", "--help"))
    found = json.loads(run("-c", PROGRAM))
    assert "`train.probes` is 0, but must be at least 1 (how often to probe)" in found.pop("bounds")
    assert "Did you mean train.probes" in found.pop("near")
    assert found == {"default": 7, "given": 8, "names differ": True, "bound": 8, "trainer": 9}


def test_every_key_says_what_it_is_for() -> None:
    assert [one.name for one in every_key().values() if not one.doc or one.doc.endswith(".")] == []
    assert {key: one.identity for key, one in every_key().items() if key.startswith("policy.")} == {
        key: Identity.FREE for key in every_key() if key.startswith("policy.")
    }


def test_the_default_of_each_group_is_a_file_of_it() -> None:
    for group, choice in GROUPS.items():
        assert choice is None or (ROOT / "slurmddp" / "conf" / group / f"{choice}.yaml").is_file()


def table() -> str:
    """Return the keys as `docs/reference/configuration.md` lists them, section by section."""
    sections = [rows(one.name, f"`{one.name}`: {one.doc}") for one in TOP.values() if one.sections]
    return "\n".join(row for part in [rows("", "Top level"), *sections] for row in part)


def rows(section: str, title: str) -> list[str]:
    shown = [
        f"| `{one.name}` | {default_of(one)} | {linked(one.doc)} | {one.identity.value} |"
        for one in every_key().values()
        if one.name.rpartition(".")[0] == section and (section or not one.sections)
    ]
    return [f"## {title}\n", "| key | default | meaning | another value: |", "|---|---|---|---|", *shown, ""]


def default_of(one: Key) -> str:
    return "null" if one.default is None else one.shown_default.replace(" | ", ", ")


def test_the_page_of_the_configuration_lists_every_key() -> None:
    page = ROOT / "docs" / "reference" / "configuration.md"
    text = page.read_text()
    if os.environ.get("SLURMDDP_REWRITE_GOLDEN"):
        page.write_text(TABLE.sub(lambda _: table(), text))
    assert TABLE.search(page.read_text())[0] == table(), "run the test with SLURMDDP_REWRITE_GOLDEN=1"
