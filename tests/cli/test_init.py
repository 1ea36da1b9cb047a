"""`slurmddp init`: a project whose next command works at once."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from jsonschema import Draft202012Validator

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG
from slurmddp.settings.json_schema import schemas
from slurmddp.slurm import client
from support.slurm import sites
from support.slurm.slurm_jobs import FakePrograms

CONF = {"conf/slurmddp.yaml", "conf/model/classifier.yaml", "conf/data/spirals.yaml"}
SCHEMAS = {f"conf/.schema/{name}.json" for name in schemas()}
FILES = {".gitignore", "my_model.py", *CONF, *SCHEMAS}
AGENT_FILES = {"AGENTS.md", ".agents/skills/slurmddp/SKILL.md"}


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "on_path", lambda: False)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_printed_next_command_trains_the_example(laptop, capsys, monkeypatch, forked_agents):
    assert main(["init", "my project"]) == 0
    out = capsys.readouterr().out
    assert files(laptop / "my project") == FILES
    (line,) = [line for line in out.splitlines() if line.startswith("next")]
    cd, folder, also, command, *words = shlex.split(line.removeprefix("next"))
    assert (cd, also, command) == ("cd", "&&", "slurmddp")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Finished: 300 steps, held-out loss 1." in said
    assert " -> 0.0" in said, "the example learns"


def test_no_file_is_changed(laptop, capsys):
    (laptop / "my_model.py").write_text("mine")
    assert main(["init"]) == 0
    out = capsys.readouterr().out
    assert "kept    my_model.py (exists; not changed)\n" in out
    assert "next    slurmddp train name=first\n" in out
    assert (laptop / "my_model.py").read_text() == "mine"
    assert main(["init"]) == 0
    assert "wrote" not in capsys.readouterr().out


def test_a_schema_of_an_earlier_version_is_written_again(laptop, capsys):
    assert main(["init"]) == 0
    assert "wrote   conf/.schema (for editors)\n" in capsys.readouterr().out
    schema = laptop / "conf/.schema/slurmddp.json"
    written = schema.read_text()
    schema.write_text("{}")
    assert main(["init"]) == 0
    assert "wrote   conf/.schema (for editors)\n" in capsys.readouterr().out
    assert schema.read_text() == written
    assert main(["init"]) == 0
    assert "kept    conf/.schema (up to date)\n" in capsys.readouterr().out


def test_a_project_that_exists_gets_no_example_again(laptop, capsys):
    assert main(["init"]) == 0
    (laptop / "my_model.py").unlink()
    (laptop / "conf/.schema/model.json").unlink()
    capsys.readouterr()
    assert main(["init", "--agent"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("wrote", "kept"))]
    written = [*sorted(AGENT_FILES, reverse=True), "conf/.schema (for editors)"]
    assert printed == [f"wrote   {name}" for name in written]
    assert files(laptop) == (FILES | AGENT_FILES) - {"my_model.py"}


def test_each_written_file_names_its_schema(laptop):
    assert main(["init"]) == 0
    for name in CONF:
        file = laptop / name
        line = file.read_text().splitlines()[0]
        named = file.parent / line.removeprefix("# yaml-language-server: $schema=")
        schema = json.loads(named.read_text())
        assert Draft202012Validator(schema).is_valid(yaml.safe_load(file.read_text()))
        assert named.stem == ("slurmddp" if file.stem == "slurmddp" else file.parent.name)


def test_files_for_agents_are_written_if_asked_for_and_never_changed(laptop, capsys):
    (laptop / "AGENTS.md").write_text("mine")
    assert main(["init", "--agent"]) == 0
    assert "kept    AGENTS.md (exists; not changed)\n" in capsys.readouterr().out
    assert files(laptop) == FILES | AGENT_FILES
    assert (laptop / "AGENTS.md").read_text() == "mine"
    skill = laptop / ".agents/skills/slurmddp/SKILL.md"
    assert skill.read_text().startswith("---\nname: slurmddp\n")


def test_a_login_node_gets_cluster_files_that_compose(programs: FakePrograms, laptop, monkeypatch, capsys):
    monkeypatch.setattr(client, "on_path", lambda: True)
    for name, text in (("partitions", sites.PARTITIONS), ("nodes-of-partitions", sites.NODES)):
        programs.write(name, text)
    programs.write("config", sites.CONFIG.replace("associations,limits,qos,safe", "none"))
    assert main(["init"]) == 0
    assert "        slurmddp train +cluster=gpu name=first --check\n" in capsys.readouterr().out
    assert main(["train", "+cluster=gpu", "name=first", "--check"]) == 0


def test_a_silent_slurm_costs_only_the_cluster_files(programs: FakePrograms, laptop, monkeypatch, capsys):
    monkeypatch.setattr(client, "on_path", lambda: True)
    programs.write("silence", "Unable to contact slurm controller")
    assert main(["init", "new"]) == 0
    assert files(laptop / "new") == FILES
    said = capsys.readouterr().err
    assert "no cluster files were written: scontrol failed: Unable to contact slurm controller." in said
    assert "Run the command again once `scontrol ping` shows it UP" in said


def test_a_file_is_no_folder(laptop, capsys):
    (laptop / "taken").write_text("")
    assert main(["init", "taken"]) == EXIT_CONFIG
    assert "taken is a file" in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "reason"), [("taken/inside", "Not a directory"), ("full", "No space")])
def test_a_project_that_can_not_be_written_is_named(laptop, capsys, monkeypatch, folder, reason):
    (laptop / "taken").write_text("")
    if folder == "full":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("slurmddp.cli.new_files._write", Mock(side_effect=full))
    assert main(["init", folder]) == EXIT_CONFIG
    refused = capsys.readouterr().err
    assert f"{laptop}/{folder}/conf/" in refused and reason in refused
