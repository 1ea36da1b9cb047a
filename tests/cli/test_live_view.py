"""The view of a running training: a bar on a terminal, plain lines elsewhere, and no end if nobody reads."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from slurmddp.cli.live_view import RunProgress, RunView, countdown, new_records
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.merged_logs import LineReader


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def metric(folder: RunFolder, step: int, **facts: float) -> None:
    append_line(folder.metrics_file, {"step": step, "attempt": 0, "time": 4e9 + step, **facts})


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_without_a_terminal_it_prints_a_line_at_first_then_sparingly(folder):
    stream, now = io.StringIO(), Clock()
    with RunView(folder, 40, stream=stream, now=now) as view:
        for step in (10, 20, 30):
            metric(folder, step, loss=3.0 - step / 100, tokens_per_s=12345.0)
            view.tick()
            now.now += 3
        assert lines(stream) == [
            "step 10/40  loss 2.900  12.3k tokens/s",
            "step 30/40  loss 2.700  12.3k tokens/s  0:10 left",
        ]


def test_a_script_shows_no_total_because_only_it_knows_its_steps(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for live in (False, True):
        stream = io.StringIO()
        with RunView(folder, None, stream=stream, live=live, now=Clock()) as view:
            for step in (10, 20):
                metric(folder, step, loss=2.5)
                metric(folder, step, eval_loss=2.25)
            view.tick()
        assert "step 20  held-out loss 2.2500" in stream.getvalue()
        assert "20/" not in stream.getvalue() and "left" not in stream.getvalue()


def test_a_held_out_loss_is_always_printed(folder):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, now=Clock()) as view:
        metric(folder, 10, loss=2.5, samples_per_s=3.5)
        metric(folder, 10, eval_loss=2.25)
        metric(folder, 20, eval_loss=2.125, accuracy=0.25)
        view.tick()
    assert lines(stream) == [
        "step 10/40  loss 2.500  3.50 samples/s",
        "step 10/40  held-out loss 2.2500",
        "step 20/40  held-out loss 2.1250  accuracy 0.2500",
    ]


def test_events_tell_the_story_of_a_run(folder):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, now=Clock()) as view:
        folder.add_event("submitted", job_id="7", submitter="sbatch")
        view.tick()
        assert view.progress.activity == "waiting in the queue"
        folder.add_event("started", attempt=0, job_id="7", nodes="n[1-2]", launcher="slurm")
        view.tick()
        assert "importing torch" in view.progress.activity
        folder.add_event("warned", attempt=0, about="checkpoint", text="Checkpoint 30 can't be used.")
        view.tick()
        assert "importing torch" in view.progress.activity
        folder.add_event("resumed", attempt=0, step=20)
        folder.add_event("first_step", attempt=0, step=21)
        view.tick()
        assert (view.progress.activity, view.progress.step) == ("", 20)
        folder.add_event("signalled", attempt=0, signal="SIGTERM", rank=1)
        view.tick()
        assert view.progress.activity == "saving"
        folder.add_event("ended", attempt=0, exit_code=75, outcome="stopped", next="requeue")
    assert lines(stream) == [
        "submitted as job 7",
        "attempt 0 starts on n[1-2]",
        "Checkpoint 30 can't be used.",
        "resuming from step 20",
        "stopping at a checkpoint (SIGTERM)",
        "attempt 0 ended: stopped",
    ]


def test_a_program_that_may_report_no_step_is_running_from_its_start_on(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    stream = io.StringIO()
    with RunView(folder, None, stream=stream, live=True, output=True, now=Clock()) as view:
        for event in ("started", "resumed", "restarted"):
            folder.add_event("rank_failed", attempt=0, rank=1, host="n1", exit_code=1)
            view.tick()
            assert view.progress.activity == "ending the other ranks"
            folder.add_event(event, attempt=0, launcher="local", step=3)
            view.tick()
            assert view.progress.activity == "running, no step reported"
        metric(folder, 4, loss=2.5)
        view.tick()
    assert "running, no step reported" in stream.getvalue()
    assert "importing" not in stream.getvalue()
    assert (view.progress.activity, view.progress.step) == ("", 4)


@pytest.mark.parametrize(
    ("event", "facts", "line"),
    [
        ("signalled", {"signal": "SIGUSR2"}, "stopping at a checkpoint (time limit)"),
        ("signalled", {"signal": "time_limit"}, "stopping at a checkpoint (time limit)"),
        ("signalled", {"signal": "stop_file"}, "stopping at a checkpoint (on request)"),
        ("signalled", {"signal": "the time limit on rank 0"}, "stopping at a checkpoint (time limit)"),
        ("signalled", {"signal": "/runs/gpt-1/stop"}, "stopping at a checkpoint (on request)"),
        ("ended", {"outcome": "failed", "next": "none"}, "attempt 0 ended: failed"),
        ("preflight", {"nodes": 2, "seconds": 0.583, "failed": []}, "preflight passed: 2 nodes in 0.6 s"),
        ("preflight", {"nodes": 2, "seconds": 0.583, "failed": ["n1: slow"]}, ""),
        ("rank_failed", {"rank": 3, "exit_code": 1}, "rank 3 on n1 ended with exit code 1"),
        (
            "rank_failed",
            {"rank": 1, "signal": "SIGKILL", "reason": "out of memory: so"},
            "rank 1 on n1 was killed by SIGKILL: out of memory: so",
        ),
        ("rank_failed", {"rank": 1, "reason": "stalled: in its step"}, "rank 1 on n1 stalled: in its step"),
        ("rank_failed", {"node_rank": 2, "reason": "lost node: silent"}, "node 2 (n1) was lost: silent"),
        (
            "restarted",
            {"restart_count": 1, "step": 40},
            "the ranks restart in place (restart 1); they had reached step 40",
        ),
        ("restarted", {"generation": 2, "step": -1}, "the ranks restart in place (restart 2)"),
        (
            "restarted",
            {"restart_count": 1, "spare": [3], "nodes": 2},
            "the ranks restart in place (restart 1, with spare node 3 on 2 nodes)",
        ),
    ],
)
def test_an_event_is_told_in_one_line(event, facts, line):
    assert RunProgress(40).add_event({"event": event, "host": "n1", "rank": None, **facts}) == line


def test_what_was_there_before_is_not_shown(folder):
    metric(folder, 10, loss=2.5)
    folder.add_event("started", attempt=0, nodes="a")
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, live=True) as view:
        folder.add_event("started", attempt=0, nodes="[red]")
        view.tick()
        assert "importing torch" in stream.getvalue()
        metric(folder, 30, loss=2.5, tokens_per_s=900.0)
        metric(folder, 30, eval_loss=2.25)
        view.tick()
        view.print("a line with [bold]brackets[/bold]")
    shown = stream.getvalue()
    for words in ("loss 2.500", "held-out 2.250", "900 tokens/s", "step 30/40  held-out loss 2.2500"):
        assert words in shown
    assert "attempt 0 starts on [red]" in shown and "[bold]brackets[/bold]" in shown


def test_the_bar_is_taken_away_when_the_training_raises(folder):
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="rank"), RunView(folder, 40, stream=stream, live=True) as view:
        raise RuntimeError("rank")
    stream.truncate(0)
    view.print("afterwards")
    assert stream.getvalue().strip("\0") == "afterwards\n"


def test_the_time_to_go_follows_the_last_steps():
    progress = RunProgress(100)
    assert progress.remaining_s is None
    for step, seconds in ((10, 100.0), (20, 105.0), (30, 110.0)):
        progress.add_metric({"step": step, "time": seconds, "loss": 1.0})
    assert progress.remaining_s == 35.0
    progress.add_metric({"step": 20, "time": 500.0, "loss": 1.0})
    assert progress.remaining_s is None, "after a restart the pause in between is no pace"
    assert [countdown(value) for value in (0, 61.4, 3723, -4)] == ["0:00", "1:01", "1:02:03", "0:00"]


def test_a_line_that_is_still_being_written_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = LineReader(path)
    assert new_records(reader) == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert new_records(reader) == [{"step": 1}]
    with path.open("ab") as stream:
        stream.write(b'ep": 2}\nnonsense\n[1]\n{"step": 3}\n')
    assert new_records(reader) == [{"step": 2}, {"step": 3}]


def test_what_a_program_of_ones_own_prints_is_shown_on_request(folder):
    for output in (True, False):
        stream = io.StringIO()
        with RunView(folder, 40, stream=stream, now=Clock(), output=output) as view:
            folder.add_event("started", attempt=0, job_id="7", nodes="n1", launcher="local")
            folder.log_dir(0).mkdir(parents=True, exist_ok=True)
            view.tick()
            folder.rank_log(0, 0).write_text("epoch 0\nepoch 1")
            folder.add_event("started", attempt=1, job_id="7", nodes="n1", launcher="local")
            folder.log_dir(1).mkdir(parents=True, exist_ok=True)
            view.tick()
            folder.rank_log(1, 0).write_text("epoch 2\nno line break")
        assert ("epoch 1" in lines(stream), "no line break" in lines(stream)) == (output, output)


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


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@pytest.mark.parametrize(
    ("place", "live"),
    [*itertools.product([closed_terminal, full_disk], [True, False]), (closed_pipe, False)],
)
def test_a_run_goes_on_when_what_it_says_can_not_be_written(folder, place, live):
    with place() as stream, RunView(folder, 40, stream=stream, live=live) as view:
        for step in (10, 20):
            metric(folder, step, loss=2.0, eval_loss=2.0)
            view.tick()
        view.print("the last word")
    assert view.progress.step == 20


@pytest.mark.parametrize("facts", [{"loss": 2.0}, {"eval_loss": 2.0}])
@pytest.mark.parametrize("live", [True, False])
def test_a_run_goes_on_when_its_terminal_is_closed_meanwhile(folder, live, facts):
    window, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream, RunView(folder, 40, stream=stream, live=live) as view:
        os.close(window)
        metric(folder, 10, **facts)
        view.tick()
        view.tick()
    assert view.progress.step == 10


@pytest.mark.parametrize("live", [True, False])
def test_of_a_line_that_a_program_redraws_what_stood_last_is_shown(folder, live):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, live=live, output=True) as view:
        folder.add_event("started", attempt=0, job_id="7", nodes="n1", launcher="local")
        folder.log_dir(0).mkdir(parents=True)
        view.tick()
        folder.rank_log(0, 0).write_bytes(b"\r  0%|    |\r 50%|##  |\r100%|####|\nepoch 1\r\n")
    shown = stream.getvalue()
    assert "100%|####|\n" in shown and "epoch 1\n" in shown
    assert "50%" not in shown
