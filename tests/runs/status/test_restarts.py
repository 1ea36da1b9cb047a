"""Where a run stands whose ranks have begun again in place."""

from __future__ import annotations

import pytest

from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.status.run_status import status
from support.runs.run_events import ended, event, make_folder, saved, started, write


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path, "name: gpt\n")


def test_ranks_that_began_again_in_place_stand_where_they_went_on(folder):
    def metric(step, time):
        append_line(folder.metrics_file, {"step": step, "attempt": 0, "time": time, "loss": 3.0})

    write(
        folder,
        started(110.0),
        event("first_step", 111.0, 0, step=1),
        saved(120.0, 100),
    )
    metric(140, 125.0)
    write(folder, event("restarted", 126.0, 0, generation=1, step=140))
    assert status(folder, None).step == 140  # Where they go on is not known yet.
    write(folder, event("resumed", 127.0, 0, step=80, **{"from": "disk"}))
    assert status(folder, None).step == 80
    metric(90, 128.0)
    assert status(folder, None).step == 90
    write(folder, saved(129.0, 100))
    assert status(folder, None).step == 100


def test_ranks_that_began_again_before_their_first_step_stand_where_they_went_on(folder):
    write(folder, started(110.0))
    append_line(folder.metrics_file, {"step": 140, "attempt": 0, "time": 125.0, "loss": 3.0})
    write(folder, ended(190.0, "stopped", next_="requeue"), started(200.0, 1))
    write(folder, event("resumed", 201.0, 1, step=100, **{"from": "disk"}))
    assert status(folder, None).step == 100
    write(folder, event("restarted", 202.0, 1, generation=1, step=-1))
    write(folder, event("resumed", 203.0, 1, step=100, **{"from": "disk"}))
    assert status(folder, None).step == 100
