"""The logs of a run as one stream, across its attempts."""

from __future__ import annotations

import json

import pytest

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status import follow_logs, merged_logs
from slurmddp.runs.status.merged_logs import ChosenLogs

RANK_0 = ChosenLogs()
ALL = ChosenLogs(everything=True)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "gpt-0a1b2c3d")


def write(folder, attempt, name, text, mode="a"):
    folder.log_dir(attempt).mkdir(parents=True, exist_ok=True)
    with (folder.log_dir(attempt) / name).open(mode) as stream:
        stream.write(text)


def fail(folder, attempt):
    left = {"rank": 3, "host": "node4", "exit_code": 1, "signal": None, "last_lines": ["Traceback", "boom"]}
    folder.failure_file(attempt).write_text(json.dumps(left))


def fill(folder, attempt=0):
    for name in ("rank-10.log", "rank-2.log", "rank-0.log", "node-1.log", "node-0.log", "batch.log"):
        write(folder, attempt, name, f"one of {name}\ntwo of {name}\n")


def test_t14_every_line_has_the_label_of_its_process_ranks_in_order(folder):
    fill(folder)
    lines = list(merged_logs.snapshot(folder, 0, ALL, 1))
    assert lines == [
        "[rank 0] two of rank-0.log",
        "[rank 2] two of rank-2.log",
        "[rank 10] two of rank-10.log",
        "[node 0] two of node-0.log",
        "[node 1] two of node-1.log",
        "[batch] two of batch.log",
    ]


def test_t14_rank_0_is_shown_unless_others_are_asked_for(folder):
    fill(folder)
    assert list(merged_logs.snapshot(folder, 0, RANK_0, 1)) == ["[rank 0] two of rank-0.log"]
    assert list(merged_logs.snapshot(folder, 0, ChosenLogs(frozenset({2, 10})), 1)) == [
        "[rank 2] two of rank-2.log",
        "[rank 10] two of rank-10.log",
    ]


def test_the_failing_rank_comes_after_the_logs(folder):
    fill(folder)
    fail(folder, 0)
    lines = list(merged_logs.snapshot(folder, 0, RANK_0, 0))
    assert lines == [
        "-- attempt 0: rank 3 on node4 ended with exit code 1; its last lines:",
        "[rank 3] Traceback",
        "[rank 3] boom",
    ]


def test_the_ends_of_other_ranks_and_earlier_failures_are_shown_too(folder):
    fill(folder)
    left = {
        "rank": 3,
        "host": "node4",
        "exit_code": 1,
        "reason": "no space left: OSError",
        "restart_count": 1,
    }
    write(folder, 0, "failure.json", json.dumps(left))
    write(folder, 0, "failure-g0.json", json.dumps({"rank": 1, "host": "node2", "signal": "SIGSEGV"}))
    for rank, end in enumerate(
        ({"signal": "SIGTERM"}, {"signal": "SIGTERM"}, {"exit_code": 75}, {"exit_code": 1})
    ):
        write(folder, 0, f"exit-rank-{rank}", json.dumps({"rank": rank, "host": "node4", **end}))
    assert list(merged_logs.snapshot(folder, 0, RANK_0, 0)) == [
        "-- attempt 0: rank 1 on node2 was killed by SIGSEGV; the ranks restarted in place",
        "-- attempt 0: rank 3 on node4 ended with exit code 1: no space left: OSError",
        "-- of the other ranks: 2 killed by SIGTERM, 1 exit code 75",
        "-- Free space on that disk, or ask for a larger quota.",
    ]


def test_where_no_rank_has_spoken_node_and_batch_do(folder):
    write(folder, 0, "rank-0.log", "")
    write(folder, 0, "node-0.log", "no module named mine\n")
    write(folder, 0, "batch.log", "")
    assert list(merged_logs.snapshot(folder, 0, RANK_0, 5)) == ["[node 0] no module named mine"]


@pytest.mark.parametrize("count", [1, 3, 1000, None])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_tail_gives_the_last_lines(tmp_path, count, ending):
    every = [f"line {number} {'x' * 300}" for number in range(1000)]
    path = tmp_path / "rank-0.log"
    path.write_text("\n".join(every) + ending)
    assert merged_logs.tail(path, count) == (every if count is None else every[-count:])


def test_tail_of_odd_files(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"")
    assert merged_logs.tail(path, 5) == []
    path.write_bytes(b"caf\xe9 \x00\n\n")
    assert merged_logs.tail(path, 5) == ["caf\N{REPLACEMENT CHARACTER} \x00", ""]
    assert merged_logs.tail(path, 0) == []


def follow(folder, *acts, selection=RANK_0, count=20):
    """Follow the logs of a run; each sleep between two looks runs the next of `acts` instead."""
    left = list(acts)
    return list(
        follow_logs.follow(
            folder, selection, count=count, has_ended=lambda: not left, sleep=lambda _: left.pop(0)()
        )
    )


def end(folder, attempt, **facts):
    folder.add_event("ended", attempt=attempt, job_id="7", **facts)


def test_follow_continues_with_later_lines(folder):
    write(folder, 0, "rank-0.log", "old\nhalf of a l")
    lines = follow(
        folder,
        lambda: write(folder, 0, "rank-0.log", "ine\nnew\n"),
        lambda: write(folder, 0, "rank-0.log", "no line end"),
    )
    assert lines == ["[rank 0] old", "[rank 0] half of a line", "[rank 0] new", "[rank 0] no line end"]


def test_follow_shows_the_last_lines_and_survives_a_log_that_is_written_anew(folder):
    write(folder, 0, "rank-0.log", "one\ntwo\na long third line\n")
    lines = follow(folder, lambda: write(folder, 0, "rank-0.log", "new\n", mode="w"), count=2)
    assert lines == ["[rank 0] two", "[rank 0] a long third line", "[rank 0] new"]


def test_follow_crosses_restarts_and_shows_failures(folder):
    write(folder, 0, "rank-0.log", "first\n")

    def restart():
        write(folder, 0, "rank-0.log", "last of 0\n")
        fail(folder, 0)
        end(folder, 0, exit_code=1, outcome="failed", next="requeue")
        write(folder, 1, "rank-0.log", "again\n")

    assert follow(folder, restart, lambda: end(folder, 1, exit_code=0, outcome="finished", next="none")) == [
        "[rank 0] first",
        "[rank 0] last of 0",
        "-- attempt 0: rank 3 on node4 ended with exit code 1; its last lines:",
        "[rank 3] Traceback",
        "[rank 3] boom",
        "-- attempt 0: failed, exit code 1",
        "-- attempt 1 starts",
        "[rank 0] again",
        "-- attempt 1: finished, exit code 0",
    ]


def test_follow_of_everything_waits_for_the_first_attempt_and_takes_up_new_ranks(folder):
    folder.path.mkdir()
    first, *lines = follow(
        folder,
        lambda: None,
        lambda: write(folder, 0, "batch.log", "starting\n"),
        lambda: write(folder, 0, "rank-1.log", "hello\n"),
        selection=ALL,
    )
    assert "no attempt has started" in first
    assert lines == ["-- attempt 0 starts", "[batch] starting", "[rank 1] hello"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"\r 0%|  |\r100%|##|\nepoch 1\r\n", ["100%|##|", "epoch 1"]),
        (b"\r 50%|# |\r         \repoch 1\n\r 50%|# |", ["epoch 1", " 50%|# |"]),
    ],
)
def test_a_redrawn_line_shows_its_last_text(tmp_path, text, lines):
    path = tmp_path / "rank-0.log"
    path.write_bytes(text)
    assert merged_logs.tail(path, 5) == lines


@pytest.mark.parametrize("count", [1, 5])
def test_of_a_line_that_never_ends_only_the_end_is_read(tmp_path, monkeypatch, count):
    """A progress bar may redraw a line for days."""
    monkeypatch.setattr(merged_logs, "_LINE_LIMIT", 100_000)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"begin\n" + b"x" * 1_000_000)
    reader = merged_logs.LineReader(path)
    assert len("".join([*reader.start(count), *reader.flush()])) <= 2 * 100_000
    with path.open("ab") as stream:
        stream.write(b"y" * 1_000_000)
    assert reader.read() == [] and len(reader.rest) == 100_000
    with path.open("ab") as stream:
        stream.write(b"z\nnext\n")
    last, following = reader.read()
    assert last.endswith("yz") and following == "next"
