"""The goodput of a run folder: events, lines of metrics, configuration and status together."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.report.goodput import AttemptTime, measure, read_goodput
from slurmddp.runs.status.run_status import RunStatus
from support.runs.run_events import FAILED, ended, event, make_folder, saved, started, write

RUNNING = RunStatus(name="gpt", path=Path(), state="running", detail="", active=True)
TRAINED = (event("first_step", 10, 0, step=1), saved(32, 20))


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path, "name: gpt\ntrain: {steps: 40}\n")


def test_lines_of_metrics_are_looked_at_for_an_attempt_without_an_end(folder):
    write(folder, started(0), *TRAINED, started(100, 1))
    append_line(folder.metrics_file, {"step": 25, "attempt": 0, "time": 37.0, "loss": 1.0})
    goodput = read_goodput(folder, RUNNING, 110.0)
    assert goodput.parts == {"training": 20, "saving": 2, "lost": 5, "starting": 20, "queued": 63}


@pytest.mark.parametrize(("host", "training"), [("another-host", 20), (socket.gethostname(), 88)])
def test_a_local_run_that_is_not_seen_is_not_believed_to_train(folder, monkeypatch, host, training):
    monkeypatch.setattr(
        "slurmddp.runs.report.goodput.is_alive", lambda newest: newest.host != "another-host" or None
    )
    write(folder, started(0, launcher="local", job_id="local-1", pid=1, host=host), *TRAINED)
    assert read_goodput(folder, RUNNING, 100.0).parts["training"] == training


@pytest.mark.parametrize(
    ("state", "active", "parts"),
    [
        ("running", True, {"training": 88}),
        ("cancelled", True, {"training": 88}),
        ("stopped", True, {"queued": 68}),
        ("unknown", True, {}),
        ("lost", False, {}),
    ],
)
def test_the_status_decides_whether_a_run_continues(folder, state, active, parts):
    write(folder, started(0), *TRAINED)
    goodput = read_goodput(folder, replace(RUNNING, state=state, active=active), 100.0)
    assert goodput.parts == {"training": 20, "saving": 2, "starting": 10} | parts


def test_a_script_that_recorded_a_first_step_is_starting_before_the_next_one(folder):
    folder.config_file.write_text("name: gpt\nprogram: {script: train.py}\n")
    write(folder, started(0), *TRAINED, ended(34, "stopped"), started(34, 1), ended(40, "stopped", attempt=1))
    goodput = read_goodput(folder, replace(RUNNING, state="stopped", active=False), 40.0)
    assert goodput.parts["starting"] == 16 and "unknown" not in goodput.parts


@pytest.mark.parametrize(
    "program", ["{_target_: my.train}", "{script: train.py, _target_: slurmddp.training.trainer.train}"]
)
def test_a_custom_program_is_known_by_the_configuration(folder, program):
    folder.config_file.write_text(f"name: gpt\nprogram: {program}\n")
    write(folder, started(0))
    assert read_goodput(folder, RUNNING, 5.0).parts == {"unknown": 5}


def test_the_times_for_programs_add_up():
    goodput = measure([*FAILED, started(170, 1)], now=180, running=True)
    assert goodput.whole == sum(goodput.parts.values()) == 80
    assert goodput.share == 0.25
    assert goodput.attempts[1] == AttemptTime(1, {"queued": 9.0, "starting": 10.0})
