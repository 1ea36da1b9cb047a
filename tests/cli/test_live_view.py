"""The view of a running training: a bar on a terminal, plain lines elsewhere, no stale facts."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from slurmddp.cli.live_view import Reading, RunView, clock, new_records
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.logs import LineReader


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


def test_a_held_out_loss_is_always_printed(folder):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, now=Clock()) as view:
        metric(folder, 10, loss=2.5, samples_per_s=3.5)
        metric(folder, 10, eval_loss=2.25)
        metric(folder, 20, eval_loss=2.125)
        view.tick()
    assert lines(stream) == [
        "step 10/40  loss 2.500  3.50 samples/s",
        "step 10/40  held-out loss 2.2500",
        "step 20/40  held-out loss 2.1250",
    ]


def test_events_tell_the_story_of_a_run(folder):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream, now=Clock()) as view:
        folder.add_event("submitted", job_id="7", submitter="sbatch")
        view.tick()
        assert view.reading.note == "waiting in the queue"
        folder.add_event("started", attempt=0, job_id="7", nodes="n[1-2]", launcher="slurm")
        view.tick()
        assert "importing torch" in view.reading.note
        folder.add_event("warned", attempt=0, about="checkpoint", text="Checkpoint 30 can't be used.")
        view.tick()
        assert "importing torch" in view.reading.note
        folder.add_event("resumed", attempt=0, step=20)
        folder.add_event("first_step", attempt=0, step=21)
        view.tick()
        assert (view.reading.note, view.reading.step) == ("", 20)
        folder.add_event("signalled", attempt=0, signal="SIGTERM", rank=1)
        view.tick()
        assert view.reading.note == "saving"
        folder.add_event("ended", attempt=0, exit_code=75, outcome="stopped", next="requeue")
    assert lines(stream) == [
        "submitted as job 7",
        "attempt 0 starts on n[1-2]",
        "Checkpoint 30 can't be used.",
        "resuming from step 20",
        "stopping at a checkpoint (SIGTERM)",
        "attempt 0 ended: stopped, requeued",
    ]


@pytest.mark.parametrize(
    ("signal", "reason"),
    [("SIGUSR2", "time limit"), ("the time limit", "time limit"), ("/runs/gpt-1/stop", "on request")],
)
def test_a_stop_is_shown_with_its_reason(signal, reason):
    line = Reading(40).add_event({"event": "signalled", "attempt": 0, "signal": signal})
    assert line == f"stopping at a checkpoint ({reason})"


def test_a_failing_rank_is_named(folder):
    stream = io.StringIO()
    with RunView(folder, 40, stream=stream):
        folder.add_event("rank_failed", attempt=0, rank=3, host="n2", exit_code=1, signal=None)
        folder.add_event("ended", attempt=0, exit_code=1, outcome="failed", next="none")
    assert lines(stream) == ["rank 3 on n2 ended with exit code 1", "attempt 0 ended: failed"]


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
        view.say("a line with [bold]brackets[/bold]")
    shown = stream.getvalue()
    for words in (
        "30/40",
        "loss 2.500",
        "held-out 2.250",
        "900 tokens/s",
        "step 30/40  held-out loss 2.2500",
    ):
        assert words in shown
    assert "attempt 0 starts on [red]" in shown and "[bold]brackets[/bold]" in shown


def test_the_bar_is_taken_away_when_the_training_raises(folder):
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="rank"), RunView(folder, 40, stream=stream, live=True) as view:
        raise RuntimeError("rank")
    stream.truncate(0)
    view.say("afterwards")
    assert stream.getvalue().strip("\0") == "afterwards\n"


def test_the_time_to_go_follows_the_last_steps():
    reading = Reading(100)
    assert reading.remaining_s is None
    for step, seconds in ((10, 100.0), (20, 105.0), (30, 110.0)):
        reading.add_metric({"step": step, "time": seconds, "loss": 1.0})
    assert reading.remaining_s == 35.0
    reading.add_metric({"step": 20, "time": 500.0, "loss": 1.0})
    assert reading.remaining_s is None, "after a restart the pause in between is no pace"
    assert [clock(value) for value in (0, 61.4, 3723, -4)] == ["0:00", "1:01", "1:02:03", "0:00"]


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
            folder.rank_log(0, 0).write_text("epoch 0\nepoch 1\n")
        assert ("epoch 1" in lines(stream)) == output


def test_a_node_that_failed_without_a_rank_is_told():
    from slurmddp.cli.live_view import Reading

    event = {
        "event": "rank_failed",
        "rank": 1,
        "host": "n1",
        "signal": "SIGKILL",
        "reason": "out of memory: so",
    }
    assert Reading(3).add_event(event) == "rank 1 on n1 was killed by SIGKILL: out of memory: so"
    stalled = {"event": "rank_failed", "rank": 1, "host": "n1", "reason": "stalled: in its step for 9 s"}
    assert Reading(3).add_event(stalled) == "rank 1 on n1 stalled: in its step for 9 s"
    again = {"event": "restarted", "generation": 1, "step": 40}
    assert Reading(3).add_event(again) == (
        "the ranks restart in place (generation 1); they had reached step 40"
    )
    elsewhere = again | {"spare": [3], "nodes": 2}
    assert Reading(3).add_event(elsewhere) == (
        "the ranks restart in place (generation 1, with spare node 3 on 2 nodes); they had reached step 40"
    )
    lost = {"event": "rank_failed", "rank": None, "host": "n1", "node_rank": 2, "reason": "lost node: silent"}
    assert Reading(3).add_event(lost) == "node 2 (n1) was lost: silent"


def test_a_run_goes_on_when_nobody_reads_what_it_says(folder):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        with RunView(folder, 40, stream=stream, now=Clock()) as view:
            for step in (10, 20):
                metric(folder, step, eval_loss=2.0)
                view.tick()
        assert view.reading.step == 20
