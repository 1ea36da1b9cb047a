"""The result of a function is read from a finished run, and only from a file of this account."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import slurmddp
from slurmddp import function_call
from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.runs.folder import owner
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import FUNCTION_CALL
from support.runs.cli_runs import end, start

ATTACKER = 54322


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    """The folder of a function's run that has finished."""
    folder = RunFolder(tmp_path / "runs" / "f-0123abcd4567")
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(f"name: f\nprogram: {{script: {FUNCTION_CALL}}}\n")
    start(folder)
    end(folder, "finished")
    return folder


def keep(folder: RunFolder, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 of the run return a value."""
    monkeypatch.setattr("math.returned", lambda: value, raising=False)
    function_call.main([str(folder.path), "math.returned", "[]"])


@pytest.mark.parametrize("value", [None, 5, 0.1, True, "a \u00e9", [1, [2.5]], {"a": {"b": None}}, math.inf])
def test_plain_values_come_back_as_json(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    keep(finished, (1, 2), monkeypatch)
    keep(finished, value, monkeypatch)
    assert not finished.result_file.exists()
    result = slurmddp.Run(finished.path).result()
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("value", [(1, 2), [(1,)], {1: 2}, {"a": {3}}, 1j, b"x", Path("/a")])
def test_other_values_come_back_as_they_were(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    keep(finished, 5, monkeypatch)
    keep(finished, value, monkeypatch)
    assert slurmddp.Run(finished.path).result() == value and not finished.plain_result_file.exists()


def test_a_lost_result_is_an_error_and_a_script_has_none(finished: RunFolder) -> None:
    with pytest.raises(SlurmddpError, match="contains no result"):
        slurmddp.Run(finished.path).result()
    finished.config_file.write_text("name: f\nprogram: {script: train.py}\n")
    assert slurmddp.Run(finished.path).result() is None


@pytest.mark.parametrize("changed", ["owner", "mode", "link"])
@pytest.mark.parametrize("reader", [0, ATTACKER + 1])
def test_a_pickle_that_another_account_may_have_written_is_not_loaded(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch, changed: str, reader: int, tmp_path: Path
) -> None:
    """Even root reads no pickle of other accounts. Only root can give the file to another account."""
    assert os.geteuid() == 0, "only root can give files to other accounts"
    keep(finished, (1, 2), monkeypatch)
    for path in (finished.path, finished.result_file, finished.config_file):
        os.chown(path, reader, reader)
    if changed == "owner":
        os.chown(finished.result_file, ATTACKER, ATTACKER)
    elif changed == "mode":
        os.chown(finished.result_file, reader, ATTACKER)
        finished.result_file.chmod(0o664)
    else:
        (tmp_path / "theirs").write_bytes(pickle.dumps((3, 4)))
        finished.result_file.unlink()
        finished.result_file.symlink_to(tmp_path / "theirs")

    loaded: list[bytes] = []
    monkeypatch.setattr(pickle, "loads", loaded.append)
    monkeypatch.setattr(owner.os, "geteuid", lambda: reader)
    with pytest.raises(SlurmddpError):
        slurmddp.Run(finished.path).result()
    assert not loaded


@pytest.mark.parametrize(
    "asked", ["wait", "result", "exception", "done", "status", "logs", "metrics", "report"]
)
def test_a_run_that_was_removed_is_not_waited_for(finished: RunFolder, asked: str) -> None:
    run = slurmddp.Run(finished.path)
    finished.path.rename(finished.path.with_name(".removed"))
    with pytest.raises(RunNotFoundError, match="was removed by another command"):
        getattr(run, asked)()


def test_metrics_has_one_dictionary_for_each_step(finished: RunFolder) -> None:
    lines = [
        {"step": 1, "attempt": 0, "time": 1.0, "loss": 3.0, "note": "a text"},
        {"step": 2, "attempt": 0, "time": 2.0, "loss": 2.5},
        {"step": 2, "attempt": 1, "time": 9.0, "loss": 2.25},
        {"step": 2, "attempt": 1, "time": 9.5, "eval_loss": 2.0},
        {"step": 2, "attempt": 0, "time": 2.5, "loss": 7.0, "lr": 0.5},
    ]
    for line in lines:
        append_line(finished.metrics_file, line)
    assert slurmddp.Run(finished.path).metrics() == [
        {"step": 1, "attempt": 0, "time": 1.0, "loss": 3.0},
        {"step": 2, "attempt": 1, "time": 9.5, "loss": 2.25, "eval_loss": 2.0, "lr": 0.5},
    ]


def test_a_run_shows_itself_in_a_notebook_also_after_it_was_removed(finished: RunFolder) -> None:
    run = slurmddp.Run(finished.path)
    assert run.report() == finished.report_file
    assert "finished" in run._repr_html_() and "report.html" in run._repr_html_()
    finished.path.rename(finished.path.with_name(".removed"))
    assert "was removed by another command" in run._repr_html_()


def test_the_text_of_a_status_fits_on_a_line_or_two(finished: RunFolder) -> None:
    text = repr(slurmddp.Run(finished.path).status())
    assert text.startswith(f"RunStatus(name='{finished.name}', state='finished'") and len(text) < 250
