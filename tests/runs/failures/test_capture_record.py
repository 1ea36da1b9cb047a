"""The record of a rank's death."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, NoProgressError, RankFailure
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, as_error, describe, is_consequence, likely_first
from slurmddp.runs.failures.read import read_failure, read_restarted
from slurmddp.runs.folder.layout import RunFolder
from support.runs.taken_names import refusing_open


def died(
    rank: int = 0, code: int | None = 1, sent: str | None = None, lines: tuple[str, ...] = ()
) -> Failure:
    return Failure(
        rank=rank, local_rank=rank, node_rank=0, host="n1", exit_code=code, signal=sent, last_lines=lines
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.log_dir(0).mkdir(parents=True)
    return folder


def test_the_first_failure_of_an_attempt_stands(folder: RunFolder) -> None:
    first, second = died(3, lines=("one", "two \u00fc")), died(0, None, "SIGKILL")
    assert capture.read(folder, 0) is None
    assert capture.record(folder, 0, first)
    assert not capture.record(folder, 0, second)
    assert capture.read(folder, 0) == first
    (event,) = folder.events()
    del event["time"]
    expected = {"event": "rank_failed", "attempt": 0, "rank": 3, "host": "n1", "exit_code": 1, "signal": None}
    assert event == expected | {"restart_count": 0, "node_rank": 0, "kind": "other", "reason": ""}


def test_a_failure_that_exists_stands_where_the_file_system_refuses_its_name(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refusing_open)
    assert capture.record(folder, 0, died(3))
    assert not capture.record(folder, 0, died(0))


def test_a_record_for_which_there_is_no_room_leaves_the_place_to_whoever_has_some(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(capture, "as_json", lambda failure: "x" * 10_000)
        full.setattr(
            capture, "open", lambda descriptor, *arguments, **more: os.fdopen(descriptor, "r"), raising=False
        )
        with pytest.raises(OSError, match="not writable"):
            capture.record(folder, 0, died(3))
    assert capture.record(folder, 0, died(0))
    failure = capture.read(folder, 0)
    assert failure is not None
    assert failure.rank == 0


def test_the_failure_before_a_restart_stands_beside_the_final_failure(folder: RunFolder) -> None:
    first, second = died(3, None, "SIGKILL", ("one",)), died(0)
    assert capture.record(folder, 0, second, restart_count=1)
    assert capture.record(folder, 0, first, restart_count=0)
    assert capture.read(folder, 0) is None, "the attempt continues"
    assert [(failure.rank, failure.restart_count) for failure in read_restarted(folder, 0)] == [
        (3, 0),
        (0, 1),
    ]
    assert [event["restart_count"] for event in folder.events()] == [1, 0]
    assert capture.record(folder, 0, first)


def test_a_record_of_an_earlier_version_still_reads(folder: RunFolder) -> None:
    old = {"rank": 3, "local_rank": 1, "node_rank": 1, "host": "n1", "exit_code": None, "signal": "SIGKILL"}
    folder.failure_file(0).write_text(json.dumps(old | {"time": 5.0, "last_lines": ["a"], "unheard": 1}))
    failure = capture.read(folder, 0)
    assert failure is not None
    assert (failure.rank, failure.last_lines, failure.reason, failure.restart_count) == (3, ("a",), "", 0)
    assert failure.sentence.endswith("was killed by SIGKILL (often the kernel's out-of-memory killer)")


def test_without_a_record_the_first_bad_end_of_a_rank_is_the_failure(folder: RunFolder) -> None:
    """The agents were killed before they could report more than the ends of their ranks."""
    for rank, code, restart_count in ((1, -9, 0), (2, 0, 1), (0, -15, 1), (3, 1, 1)):
        capture.write_exit(folder, 0, rank, code, restart_count)
    failure = read_failure(folder, 0)
    assert failure is not None
    assert (failure.rank, failure.signal, failure.restart_count) == (0, "SIGTERM", 1)
    capture.record(folder, 0, died(3))
    assert read_failure(folder, 0) == died(3)


def test_the_ends_of_ranks_that_restarted_are_no_failure_of_the_attempt(folder: RunFolder) -> None:
    capture.write_exit(folder, 0, 1, -9, 0)
    capture.record(folder, 0, died(1), restart_count=0)
    assert read_failure(folder, 0) is None, "the ranks that restarted still run"
    capture.write_exit(folder, 0, 0, -9, 1)
    failure = read_failure(folder, 0)
    assert failure is not None
    assert (failure.rank, failure.restart_count) == (0, 1)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("batch.log", "srun: error: n1: task 0: Out Of Memory"),
        ("batch.log", "srun ended with code 137."),
        ("node-1.log", "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0."),
        ("node-1.log", "slurmstepd: error: Step 4.0 exceeded memory limit (3 > 2), being killed"),
    ],
)
def test_an_agent_that_left_no_word_ran_out_of_memory_if_slurm_says_so(
    folder: RunFolder, log: str, reason: str
) -> None:
    folder.add_event("ended", attempt=0, lost={1: "n1"})
    (folder.log_dir(0) / log).write_text(f"{reason}\n")
    failure = read_failure(folder, 0)
    assert failure is not None
    if "ended with code" in reason:
        assert failure.sentence == "the agent on n1 recorded no exit code: it was killed, or its host failed"
        return
    assert failure.sentence == "the agent on n1 was killed by SIGKILL: out of memory: SLURM reports it"
    assert "mem_gb=" in failure.advice


def test_a_half_written_record_is_not_there_yet(folder: RunFolder) -> None:
    folder.failure_file(0).write_text('{"rank": 1, "loc')
    assert capture.read(folder, 0) is None


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (died(2, 3), "Rank 2 on n1 ended with exit code 3."),
        (died(2, 78), "Rank 2 on n1 refused to continue (exit code 78)."),
        (died(2, None, "SIGSEGV"), "Rank 2 on n1 was killed by SIGSEGV."),
        (
            died(2, None, "SIGKILL"),
            "Rank 2 on n1 was killed by SIGKILL (often the kernel's out-of-memory killer).",
        ),
        (
            Failure(rank=None, local_rank=None, node_rank=1, host="n2", exit_code=1, signal=None),
            "The agent of node 1 on n2 ended with exit code 1.",
        ),
        (
            replace(died(2, None), kind="stalled", reason="stalled in data for 312 s"),
            "Rank 2 on n1 stalled in data for 312 s. "
            "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
        ),
        (
            replace(
                died(2, None),
                rank=None,
                node_rank=1,
                kind="lost_node",
                reason="was lost: no heartbeat for 10 s",
            ),
            "Node 1 (n1) was lost: no heartbeat for 10 s. "
            "Its host or its network went down, or its agent was killed.",
        ),
    ],
)
def test_a_sentence_names_who_where_and_how(failure: Failure, sentence: str) -> None:
    assert describe(failure) == sentence


@pytest.mark.parametrize(
    ("code", "kind"), [(1, RankFailure), (None, RankFailure), (78, ConfigError), (79, NoProgressError)]
)
def test_the_error_carries_the_code_the_lines_and_the_log(code: int | None, kind: type[Exception]) -> None:
    error = as_error(died(1, code, None if code else "SIGKILL", ("ValueError: x",)), Path("logs/rank-1.log"))
    assert type(error) is kind
    assert error.exit_code == (code or 1)
    assert "    ValueError: x" in error.message
    assert "logs/rank-1.log" in error.hint


REFUSED = died(3, 78)
KILLED = died(2, None, "SIGKILL")
RAISED = died(1, 1)
ABORTED = died(0, None, "SIGABRT")
LOST_PEER = died(0, 1, lines=("RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:4711",))


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ((ABORTED, RAISED, KILLED, REFUSED), REFUSED),
        ((ABORTED, RAISED, KILLED), KILLED),
        ((ABORTED, RAISED), RAISED),
        ((LOST_PEER, RAISED), RAISED),
        ((LOST_PEER, ABORTED), ABORTED),
        ((died(5), died(4)), died(4)),
    ],
)
def test_of_failures_at_the_same_moment_the_cause_is_named(
    failures: tuple[Failure, ...], first: Failure
) -> None:
    assert likely_first(failures) == first


def test_a_rank_with_a_reason_of_its_own_is_no_consequence_whatever_it_said_last() -> None:
    lines = ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",)
    assert is_consequence(died(lines=lines))
    assert not is_consequence(replace(died(lines=lines), reason="KeyError: 'lr' (train.py:8 in main)"))


def test_last_lines_are_few_short_and_readable(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"old\n" * 50_000 + b"x" * 5000 + b"\n\n10%\r20%\r30%\n\xff broken\nlast")
    lines = capture.last_lines(log, 4)
    assert [line[:10] for line in lines] == ["xxxxxxxxxx", "30%", "\ufffd broken", "last"]
    assert len(lines[0]) == 400
    assert capture.last_lines(tmp_path / "none.log") == ()


@pytest.mark.parametrize(
    ("returncode", "expected"), [(3, (3, None)), (-9, (None, "SIGKILL")), (-40, (None, "signal 40"))]
)
def test_return_codes_are_split_into_code_and_signal(
    returncode: int, expected: tuple[object, object]
) -> None:
    assert capture.split_status(returncode) == expected


def test_the_reason_is_found_in_the_lines_of_the_rank_that_ended_not_of_the_next(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("ValueError: before\n")
    since = log.stat().st_size
    with log.open("a") as stream:
        stream.write("Traceback (most recent call last):\nValueError: 7\n")
    read = partial(capture.last_lines, log, since=since, until=log.stat().st_size)
    failure = capture.unexplained(1, read, node_rank=0, rank=0)
    with log.open("a") as stream:
        stream.write("Traceback (most recent call last):\nKeyError: 'of the next rank'\n")
    assert failure.explained.reason == "ValueError: 7"
    assert failure.explained.last_lines == ("Traceback (most recent call last):", "ValueError: 7")
    assert failure.explained.explained is failure.explained
