"""`slurmddp diff`: settings that differ, and results."""

from __future__ import annotations

import json
import re

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_NO_RUN
from slurmddp.runs.folder.jsonl import append_line
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere", "slurm")


@pytest.fixture
def pair(make_run):
    for name, lr, loss in (("a-00000001", 0.1, 2.5), ("b-00000002", 0.2, 1.25)):
        folder = make_run(name)
        folder.config_file.write_text(
            f"name: {name[0]}\ntrain: {{steps: 400}}\noptimizer: {{lr: {lr}}}\n"
            f"cluster: {{env: {{TOKEN: secret-{name}}}}}\n"
        )
        submit(folder)
        start(folder)
        append_line(folder.metrics_file, {"step": 400, "attempt": 0, "time": 1.0, "loss": loss})
        end(folder, "finished")


def test_only_settings_that_differ_and_all_results_are_shown(pair, capsys):
    assert main(["diff", "a", "b"]) == 0
    out = capsys.readouterr().out
    settings, results = out.split("\n\n")
    assert [line.split() for line in settings.splitlines()] == [
        ["SETTING", "a-00000001", "b-00000002"],
        ["optimizer.lr", "0.1", "0.2"],
    ]
    assert re.search(r"^loss +2\.5000 +1\.2500$", results, re.MULTILINE)
    assert re.search(r"^state +finished +finished$", results, re.MULTILINE)
    assert "secret" not in out


def test_without_a_second_run_the_newest_other_one_is_taken(pair, capsys):
    for first, second in (("a", "b-00000002"), ("b", "a-00000001")):
        assert main(["diff", first]) == 0
        assert second in capsys.readouterr().out.splitlines()[0]


def test_programs_read_pairs(pair, capsys):
    assert main(["diff", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["a-00000001", "b-00000002"]
    assert found["settings"] == {"optimizer.lr": [0.1, 0.2]}
    assert found["results"]["loss"] == [2.5, 1.25]


def test_equal_runs_and_missing_runs(pair, capsys):
    assert main(["diff", "a", "a"]) == 0
    assert "All settings are equal.\n" in capsys.readouterr().out
    assert main(["diff", "a", "zzz"]) == EXIT_NO_RUN
