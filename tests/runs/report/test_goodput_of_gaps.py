"""The time in which the trainer made no step: a suspended job, a frozen file system."""

from __future__ import annotations

import pytest

from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.report.goodput import measure, read_goodput
from slurmddp.runs.report.time_bars import time_bars
from slurmddp.runs.status import metrics
from slurmddp.runs.status.metrics import line_times, read_times
from slurmddp.runs.status.run_status import RunStatus
from support.runs.run_events import ended, event, make_folder, saved, started

BEGUN = [started(0), event("first_step", 100, 0, step=1)]


def lines(*times, first=1, key="loss", every=1, attempt=0):
    """Return a line of metrics for each time, with steps that count from `first`."""
    return [
        {"step": first + at * every, "attempt": attempt, "time": float(time), key: 1.0}
        for at, time in enumerate(times)
    ]


USUAL = lines(*range(101, 121))
"""A step a second until 120."""
AFTER = lines(*range(720, 730), first=21)
"""A step a second, after 600 seconds without a step."""
RESTARTED = [
    event("rank_failed", 500, 0, rank=1), event("restarted", 500, 0, restart_count=1, step=20),
    event("resumed", 600, 0, step=20, **{"from": "memory"}), event("first_step", 650, 0, step=21),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "records", "stood_still"),
    [
        pytest.param([], [*USUAL, *AFTER], 600 - 1, id="stood still for 600 s among steps of 1 s"),
        pytest.param(
            [], [*lines(*range(101, 121), every=50), *lines(*range(720, 730), first=1001, every=50)], 599,
            id="each line stands for 50 steps",
        ),
        pytest.param([], [*USUAL, *lines(*range(179, 182), first=21)], 0, id="59 s are no gap"),
        pytest.param([], [*USUAL, *lines(*range(180, 182), first=21)], 59, id="60 s are a gap"),
        pytest.param([], lines(101, 201, 301, 401, 501), 0, id="all steps are slow"),
        pytest.param([], lines(*range(101, 201, 10), 290), 0, id="nine times the usual time is no gap"),
        pytest.param([], lines(*range(101, 201, 10), 291), 90, id="ten times the usual time is a gap"),
        pytest.param(
            [], [*USUAL, *lines(*range(720, 730), first=1021)], 0,
            id="steps that were skipped, as their gradient was not finite, have no line",
        ),
        pytest.param(
            [], [*USUAL, *lines(*range(720, 730), first=15)], 0, id="a rollback loads a checkpoint"
        ),
        pytest.param(
            [], [*USUAL, *lines(719, first=21, key="eval_loss"), *AFTER], 0, id="an evaluation in the gap",
        ),
        pytest.param(
            [], [*USUAL, *lines(121, first=20, key="eval_loss"), *AFTER], 0,
            id="callbacks after an evaluation",
        ),
        pytest.param(
            [], [*USUAL, *lines(300, first=20, key="throughput_of_mine"), *AFTER], 599,
            id="a value that a callback logs is no evaluation",
        ),
        pytest.param([saved(719, 20, seconds=590)], [*USUAL, *AFTER], 0, id="a save in the gap"),
        pytest.param(
            [{**saved(719, 10, seconds=1), "written_s": 605.0}, saved(1990, 30)], [*USUAL, *AFTER], 599,
            id="a checkpoint that was written beside the training does not explain a gap",
        ),
        pytest.param(
            [], [*USUAL[:1], *lines(*range(701, 730), first=2)], 0, id="the first interval compiles"
        ),
        pytest.param(
            RESTARTED, [*USUAL, *AFTER], 500 - 121, id="a failure ends the gap before the restart"
        ),
        pytest.param(
            RESTARTED, [*USUAL, *lines(*range(121, 451), first=21), *lines(720, 721, first=351)], 0,
            id="the time of a restart is no gap",
        ),
        pytest.param(
            RESTARTED, [*USUAL, *lines(651, first=21), *lines(*range(1251, 1260), first=22)], 379,
            id="the first interval after a restart compiles",
        ),
        pytest.param(
            RESTARTED, [*USUAL, *lines(*range(651, 661), first=21), *lines(1260, 1261, first=31)], 379 + 599,
            id="a gap after a restart",
        ),
        pytest.param(
            [], [*USUAL, *lines(720, first=21, attempt=1)], 0, id="the next line is of a later attempt"
        ),
        pytest.param([], [*USUAL, {"step": 21, "loss": 1.0}, *AFTER], 599, id="a line without a time"),
    ],
)  # fmt: skip
def test_a_gap_between_two_lines_is_lost_unless_the_record_explains_it(events, records, stood_still):
    run = [*BEGUN, *events, ended(2000, "finished")]
    plain = measure(run, now=1e6)
    goodput = measure(run, now=1e6, gaps=line_times(records).gaps)
    expected = dict(plain.parts)
    expected["training"] -= stood_still
    expected["lost"] = expected.get("lost", 0) + stood_still
    assert goodput.parts == pytest.approx({kind: s for kind, s in expected.items() if s})
    assert goodput.whole == plain.whole == pytest.approx(sum(goodput.parts.values()))


@pytest.mark.parametrize(
    ("records", "lost"),
    [
        (USUAL, 740 - 121),
        ([*USUAL, *lines(121, first=20, key="eval_loss")], 0),
        (lines(*range(101, 700)), 0),
        (USUAL[:1], 0),
    ],
    ids=["nothing since", "an evaluation", "steps until shortly before", "one line"],
)
def test_a_standstill_that_ends_in_a_failure_is_lost_although_no_line_follows(records, lost):
    """The next attempt resumes from a checkpoint whose event was not written."""
    failed = [event("rank_failed", 740, 0), ended(740, "failed")]
    run = [*BEGUN, *failed, started(740, 1), event("resumed", 750, 1, step=700), ended(760, "finished", 1)]
    parts = measure(run, now=1e6, gaps=line_times(records).gaps).parts
    assert parts == {"starting": 120, "training": 640 - lost} | ({"lost": lost} if lost else {})


@pytest.mark.parametrize(
    "damage", [b"", b"no json\n", b'{"time": 5.0, "step": 7}\n', b'{"step": 9, "attempt": 0, ']
)
def test_the_times_in_the_file_are_those_of_its_records(tmp_path, damage):
    folder = make_folder(tmp_path, "name: gpt\n")
    records = [*USUAL, *lines(300, first=20, key="throughput_of_mine"), *AFTER]
    for record in [*records, *lines(800, 801, attempt=2, key="eval_loss")]:
        append_line(folder.metrics_file, record)
    with folder.metrics_file.open("ab") as stream:
        stream.write(damage)
    text = folder.metrics_file.read_bytes()
    expected = [record for line in text.split(b"\n") if (record := metrics._parse(line)) is not None]
    assert read_times(folder) == line_times(expected)
    assert len(read_times(folder).gaps[0]) == 2
    folder.metrics_file.unlink()
    assert read_times(folder) == line_times([])


def test_a_second_in_two_gaps_counts_once():
    """The clock was set back by 1000 s between two gaps."""
    records = [*USUAL, *lines(*range(1700, 1710), first=21), *lines(*range(709, 719), first=31)]
    records += lines(1700, 1701, first=41)
    run = [*BEGUN, ended(1702, "finished")]
    goodput = measure(run, now=1e6, gaps=line_times(records).gaps)
    assert goodput.parts == {"starting": 100, "training": 1602 - 1579, "lost": 1579}


def test_a_gap_in_steps_that_are_lost_is_lost_once():
    run = [*BEGUN, saved(110, 10), event("rank_failed", 740, 0), ended(740, "failed")]
    parts = measure(run, now=1e6, gaps=line_times([*USUAL, *AFTER]).gaps).parts
    assert parts == {"starting": 100, "training": 8, "saving": 2, "lost": 630}


@pytest.mark.parametrize(
    ("program", "lost"), [("", 599), ("program: {script: train.py}\n", None)], ids=["own trainer", "script"]
)
def test_only_the_lines_of_slurmddps_own_trainer_show_gaps(tmp_path, program, lost):
    folder = make_folder(tmp_path, f"name: gpt\n{program}")
    for line in [*BEGUN, ended(740, "finished")]:
        append_line(folder.attempts_file, line)
    for line in [*USUAL, *AFTER]:
        append_line(folder.metrics_file, line)
    finished = RunStatus(name="gpt", path=folder.path, state="finished", detail="", active=False)
    goodput = read_goodput(folder, finished, 1e6)
    assert goodput.parts.get("lost") == lost
    assert ("without a step" in str(time_bars(goodput))) == bool(lost)
