"""A rank from its environment to its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.failures.capture import tail_of
from slurmddp.runs.failures.causes import reason_of
from slurmddp.runs.folder.layout import RunFolder
from support.distributed import worker_jobs
from support.distributed.ranks import run_ranks
from support.distributed.worker_jobs import write_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def make_run(folder: Path, **config: Any) -> str:
    write_config(RunFolder(folder), **config)
    return str(folder)


def program(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"support.distributed.worker_jobs.{name}", **options}


def test_a_users_program_gets_distributon_config_and_folder(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, program=program("program_that_notes", size=[1], made={"_target_": "dict", "a": 1})
    )
    code, said = run_ranks(worker_jobs.work, 1, run)[0]
    assert code == 0
    assert f"seed 3 in {tmp_path.name} with {{'size': [1], 'made': {{'a': 1}}}} on 1" in said


def test_a_failing_program_shows_its_traceback(tmp_path: Path) -> None:
    code, said = run_ranks(worker_jobs.work, 1, make_run(tmp_path, program=program("program_that_fails")))[0]
    assert code == 1
    assert "ZeroDivisionError: all of it" in said
    assert "worker_jobs.py" in said


def test_a_program_that_stops_exits_with_75(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks_per_node=2, program=program("program_that_is_told_to_stop"))
    for code, said in run_ranks(worker_jobs.work, 2, run):
        assert code == 75
        assert said.endswith("StoppedAtCheckpoint: Enough.\nAgain.\n")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"program": {"_target_": "support.distributed.worker_jobs.program_that_nots"}},
            "Did you mean program_that_notes",
        ),
        ({"program": {}}, "program has no _target_"),
        ({"program": program("program_that_notes"), "nodes": 2}, "nodes=2"),
        ({"program": program("program_that_notes"), "ranks_per_node": 3}, "3 task(s)"),
        ({"program": program("program_that_notes"), "strategy": {"name": "dpp"}}, "Did you mean ddp"),
    ],
)
def test_a_wrong_configuration_exits_with_78(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    code, said = run_ranks(worker_jobs.work, 1, make_run(tmp_path, **config))[0]
    assert code == 78
    assert message in said
    assert reason_of(code, None, tail_of(said)) == said.splitlines()[-2]


def test_the_cause_of_an_error_is_printed_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, program=program("program_that_notes", made={"_target_": "int", "_args_": ["x"]}))
    code, said = run_ranks(worker_jobs.work, 1, run)[0]
    assert code == 78
    assert said.index("ValueError: invalid literal") < said.index("ConfigError: program.made: int refused")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    code, said = run_ranks(worker_jobs.work, 1, str(tmp_path))[0]
    assert code == 66
    assert "not a run folder" in said
