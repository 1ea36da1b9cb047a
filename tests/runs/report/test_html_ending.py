"""The last attempt on the report's page."""

from __future__ import annotations

import json
import re

import pytest

from slurmddp.runs.failures.causes import KILLED
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.report.html import _coded, write_report
from support.runs.run_events import add as event
from support.runs.run_events import make_folder

CONFIG = "name: gpt\nnodes: 1\nranks_per_node: 2\ntrain:\n  steps: 40\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("slurmddp.runs.report.html.time.time", lambda: 160.0)
    return make_folder(tmp_path, CONFIG)


def attempt(folder, number=0):
    event(folder, "started", 100.0, attempt=number, job_id="7", nodes="node1", launcher="slurm")
    event(folder, "first_step", 110.0, attempt=number, step=1)
    for step in (20, 40):
        line = {"step": step, "attempt": number, "time": 110.0 + step, "loss": 2.0}
        append_line(folder.metrics_file, line)
    event(folder, "saved", 140.0, attempt=number, step=30, seconds=1.0)


def test_the_end_of_a_failure_s_lines_is_what_is_seen_of_them(folder):
    attempt(folder)
    folder.log_dir(0).mkdir(parents=True)
    left = '{"rank": 0, "host": "node1", "exit_code": 1, "last_lines": ["File a.py", "ValueError: no"]}'
    folder.failure_file(0).write_text(left)
    html = write_report(folder).read_text()
    style = re.search(r"\.failure pre {([^}]*)}", html)
    assert style is not None
    assert "column-reverse" in style[1]
    assert re.search(r"<pre[^>]*><span>File a.py\nValueError: no</span></pre>", html)


def test_what_stands_between_backticks_in_an_advice_is_code(folder):
    attempt(folder)
    folder.log_dir(0).mkdir(parents=True)
    left = json.dumps({"rank": 0, "host": "node1", "signal": "SIGKILL", "reason": KILLED})
    folder.failure_file(0).write_text(left)
    folder.log_dir(0).joinpath("failure-g0.json").write_text(left)
    event(folder, "restarted", 130.0, attempt=0, generation=1, step=1)
    html = write_report(folder).read_text()
    assert html.count("<code>sacct</code>") == 2
    assert "`sacct`" not in html
    assert _coded("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"


def test_the_mark_of_the_first_held_out_loss_is_whole(folder):
    attempt(folder)
    for step in (0, 40):
        line = {"step": step, "attempt": 0, "time": 105.0 + step, "eval_loss": 3.0 - step / 40}
        append_line(folder.metrics_file, line)
    html = write_report(folder).read_text()
    marks = re.findall(r"<g([^>]*)>\s*<use [^>]*var\(--held\)", html)
    assert marks
    assert not [one for one in marks if "clip-path" in one]


def test_the_speed_is_the_speed_of_the_whole_run(folder):
    attempt(folder)
    line = {"step": 45, "attempt": 0, "time": 156.0, "loss": 2.0, "tokens_per_s": 50.0}
    append_line(folder.metrics_file, line)
    html = write_report(folder).read_text()
    assert 'Speed</dt><dd><span class="value">50</span><span class="note">tokens/s, median</span>' in html


def stopped(folder, number, reason):
    event(folder, "signalled", 150.0, attempt=number, signal=reason)
    event(folder, "ended", 151.0, attempt=number, job_id="7", exit_code=75, outcome="stopped", next="none")


def test_an_attempt_that_was_stopped_without_a_checkpoint_does_not_claim_one(folder):
    event(folder, "started", 100.0, attempt=0, job_id="7", nodes="node1", launcher="slurm")
    stopped(folder, 0, f"the file {folder.stop_file}")
    attempt(folder, 1)
    stopped(folder, 1, "SIGUSR2")
    page = write_report(folder).read_text()
    assert re.findall(r'data-label="Outcome" class="wait">([^<]*)<', page) == [
        "stopped (on request)",
        "stopped at a checkpoint (time limit)",
    ]


def test_only_an_attempt_that_resumed_from_a_checkpoint_is_marked_in_the_chart(folder):
    attempt(folder)
    stopped(folder, 0, "SIGUSR2")
    attempt(folder, 1)
    assert "dashed line" not in write_report(folder).read_text()
    event(folder, "started", 152.0, attempt=2, job_id="7", nodes="node1", launcher="slurm")
    event(folder, "resumed", 153.0, attempt=2, step=30)
    page = write_report(folder).read_text()
    assert "dashed line" in page
    assert "attempt 2" in page and "attempt 1<" not in page
