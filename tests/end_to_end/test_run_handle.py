"""Runs that are started from Python: their state, result and errors."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmddp
from slurmddp import function_call
from slurmddp.errors import ConfigError, RunNotFoundError, SlurmddpError
from slurmddp.runs.folder.layout import RunFolder

pytestmark = pytest.mark.distributed

MODULE = """
import os

def rank(factor, names):
    return factor * int(os.environ["WORLD_SIZE"]), names, os.environ["RANK"]

class Made:
    def rank(self):
        return 1

def single(number, word):
    return 1 / number, word

def seeded(number, seed=0):
    return number, seed

def broken():
    raise ValueError("no luck")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "handle_work.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("handle_work", None)


def test_a_function_runs_as_every_rank_and_the_same_call_finds_its_result(
    project: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import handle_work  # type: ignore[import-not-found]

    run = slurmddp.submit(handle_work.rank, 2.5, ["{attempt}", 'a "b"'], ranks_per_node=2)
    assert run.result(60) == (5.0, ["0", 'a "b"'], "0")
    assert run.status().state == "finished" and run.name.startswith("rank-")
    assert run.wait(240).report == run.path / "report.html"
    assert run.path.parent == project / "runs"
    attempts = (run.path / "attempts.jsonl").read_text()
    again = slurmddp.submit("handle_work.rank", 2.5, ["{attempt}", 'a "b"'], ranks_per_node=2)
    assert again.path == run.path and again.result(60) == run.result()
    assert (run.path / "attempts.jsonl").read_text() == attempts
    assert caplog.messages == []
    (project / "handle_work.py").write_text(MODULE.replace("factor *", "2 * factor *"))
    slurmddp.submit("handle_work.rank", 2.5, ["{attempt}", 'a "b"'], ranks_per_node=2)
    note = "handle_work.py has changed since this run. again=True runs the new code."
    assert caplog.messages == [f"{run.name}: {note}"] and capsys.readouterr() == ("", "")
    (project / "handle_work.py").write_text(MODULE)
    assert slurmddp.Run("rank").path == run.path
    assert slurmddp.submit("handle_work.rank", 3, [], ranks_per_node=1).result(60)[0] == 3
    named = slurmddp.submit("handle_work.seeded", 3, 4, ranks_per_node=1, seed=5, name="named")
    assert (named.result(60), named.done(), named.exception()) == ((3, 4), True, None)
    with pytest.raises(RunNotFoundError):
        slurmddp.Run("none")


def test_calls_without_a_cluster_run_here_one_after_another_and_a_failed_one_does_not_end_them(
    project: Path,
) -> None:
    words = ['a, "b"', "${c}", 1.0e-3]
    runs = slurmddp.map_array("handle_work.single", [1, 0, 4], words, ranks_per_node=1)
    assert [run.status().state for run in runs] == ["finished", "failed", "finished"]
    assert [runs[place].result() for place in (0, 2)] == [(1.0, words[0]), (0.25, words[2])]
    (first, _, last) = (run.path / "attempts.jsonl" for run in runs)
    ended, started = first.read_text().splitlines()[-1], last.read_text().splitlines()[0]
    assert json.loads(ended)["time"] <= json.loads(started)["time"]
    (sweep,) = (project / "runs").glob("single-sweep-*.sweep")
    assert [json.loads(line)["run"] for line in sweep.read_text().splitlines()] == [run.name for run in runs]


def test_an_error_of_the_function_is_the_error_of_its_result(project: Path) -> None:
    run = slurmddp.submit("handle_work.broken", ranks_per_node=1)
    with pytest.raises(
        SlurmddpError, match=r"did not finish \(failed\): rank 0 .* ValueError: no luck"
    ) as told:
        run.result(60)
    assert 'raise ValueError("no luck")' in told.value.hint
    assert "no luck" in run.logs() and str(run.exception()) == str(told.value)


def test_an_argument_may_name_a_run_folder_with_quotes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a \"b\" 'c' \\ d")
    run.path.mkdir()
    function_call.main([str(run.path), "os.path.normpath", f'["{run.path}/weights"]'])
    assert json.loads(run.plain_result_file.read_bytes()) == f"{run.path}/weights"


def test_wrong_calls_start_nothing(project: Path) -> None:
    import handle_work

    for call, words in [
        (lambda: slurmddp.submit(lambda: 1), "The ranks can't import"),
        (lambda: slurmddp.submit("handle_work.rnk", 1), "Did you mean rank"),
        (lambda: slurmddp.submit(handle_work.rank, object()), "can't be stored as text"),
        (lambda: slurmddp.submit(handle_work.rank, 1, [], nods=2), "nods"),
        (lambda: slurmddp.submit(handle_work.Made().rank), "The ranks can't import"),
        (lambda: slurmddp.submit(handle_work.rank, {1: 2}, []), "the key 1 of a dictionary is not a string"),
        (lambda: slurmddp.submit(handle_work.rank, 1), "missing a required argument: 'names'"),
        (lambda: slurmddp.submit(handle_work.seeded, 1, seed=2), "by position"),
        (lambda: slurmddp.map_array("handle_work.seeded", [1], [2], [3]), "too many positional"),
        (lambda: slurmddp.map_array("handle_work.seeded", [1], itertools.count()), "one ends after 1 value"),
        (lambda: slurmddp.train("train.steps=x"), "train.steps"),
    ]:
        with pytest.raises(ConfigError) as told:
            call()
        assert words in f"{told.value.message} {told.value.hint}"
    with pytest.raises(SlurmddpError, match=r"did not start: (?!slurmddp: error).*ranks"):
        slurmddp.submit("handle_work.rank", 1, [], ranks_per_node=4000)
    assert not (project / "runs").exists()
