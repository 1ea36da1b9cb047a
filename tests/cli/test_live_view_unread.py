"""A training continues if its output can't be written: a closed terminal, a full disk."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from slurmddp.cli.live_view import RunView
from slurmddp.cli.main import main
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from support.runs.cli_runs import end, start


@contextmanager
def closed_terminal() -> Iterator[TextIO]:
    """A terminal whose window is gone, as a run sees it that was put into the background and disowned."""
    window, terminal = os.openpty()
    os.close(window)
    with os.fdopen(terminal, "w") as stream:
        yield stream


@contextmanager
def full_disk() -> Iterator[TextIO]:
    with open("/dev/full", "w") as stream:
        yield stream


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("place", [closed_terminal, full_disk])
def test_a_run_goes_on_when_what_it_says_can_not_be_written(tmp_path, place, live):
    folder = RunFolder(tmp_path)
    with place() as stream, RunView(folder, 40, stream=stream, live=live) as view:
        for step in (10, 20):
            append_line(
                folder.metrics_file, {"step": step, "time": 4e9 + step, "loss": 2.0, "eval_loss": 2.0}
            )
            view.tick()
        view.say("the last word")
    assert view.reading.step == 20


@pytest.mark.parametrize("facts", [{"loss": 2.0}, {"eval_loss": 2.0}])
@pytest.mark.parametrize("live", [True, False])
def test_a_run_goes_on_when_its_terminal_is_closed_meanwhile(tmp_path, live, facts):
    folder = RunFolder(tmp_path)
    window, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream, RunView(folder, 40, stream=stream, live=live) as view:
        os.close(window)
        append_line(folder.metrics_file, {"step": 10, "time": 4e9, **facts})
        view.tick()
        view.tick()
    assert view.reading.step == 10


@pytest.mark.parametrize("live", [True, False])
def test_of_a_line_that_a_program_redraws_what_stood_last_is_shown(tmp_path, live):
    folder, stream = RunFolder(tmp_path), io.StringIO()
    with RunView(folder, 40, stream=stream, live=live, output=True) as view:
        folder.add_event("started", attempt=0, job_id="7", nodes="n1", launcher="local")
        folder.log_dir(0).mkdir(parents=True)
        view.tick()
        folder.rank_log(0, 0).write_bytes(b"\r  0%|    |\r 50%|##  |\r100%|####|\nepoch 1\r\n")
    shown = stream.getvalue()
    assert "100%|####|\n" in shown and "epoch 1\n" in shown
    assert "50%" not in shown


@pytest.mark.usefixtures("elsewhere")
def test_what_a_terminal_can_not_show_ends_no_command(make_run, slurm, monkeypatch):
    folder = make_run()
    start(folder)
    end(folder, "finished")
    folder.rank_log(0, 0).write_text("\u2192 step 7\n", encoding="utf-8")
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="latin-1"))
    assert main(["logs", "gpt"]) == 0
    assert b"[rank 0] \\u2192 step 7\n" in terminal.getvalue()
