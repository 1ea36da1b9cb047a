"""The last lines of a process in the failure record, and the choice of the first failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.launchers.watchdog.stacks import main_thread
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import here, tail_of
from slurmddp.runs.failures.causes import ADVICE, find_cause
from slurmddp.runs.failures.failure import (
    LAST_LINES,
    Failure,
    as_error,
    is_consequence,
    likely_first,
    node_code,
)
from slurmddp.runs.failures.kinds import Cause, FailureKind
from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import status

LOGS = Path(__file__).parent / "last_lines"
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.log_dir(0).mkdir(parents=True)
    return folder


def died(
    rank: int, code: int | None, time: float = 0.0, line: str = "", kind: FailureKind = "other"
) -> Failure:
    lines = (line,) if line else ()
    return Failure(rank=rank, host="n1", exit_code=code, signal=None, time=time, last_lines=lines, kind=kind)


LOST_NODE = Failure(
    rank=None,
    node_rank=1,
    host="n2",
    exit_code=None,
    signal=None,
    kind="lost_node",
    reason="was lost: connection closed",
)


def crash(depth: int) -> list[str]:
    """Return the text of faulthandler for a crash of a forked rank, deep in a person's code."""
    frames = [f'  File "/home/me/train.py", line {line} in level{line}' for line in range(depth)]
    agents = [
        f'  File "/x/slurmddp/launchers/agent/event_loop.py", line {line} in _turn' for line in range(20)
    ]
    other = [
        "Thread 0x01 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 3 in w',
    ]
    return [
        "step 7", "terminate called", "  what():  bad device", "Fatal Python error: Aborted", *other,
        "Current thread 0x02 (most recent call first):", *frames, *agents, "Extension modules: numpy, torch",
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [3, 60])
def test_of_a_crash_the_innermost_frames_are_kept_and_shown(depth: int) -> None:
    failure = here(-6, node_rank=0, rank=1, lines=crash(depth))
    frames = [f'  File "/home/me/train.py", line {line} in level{line}' for line in range(depth)]
    head = ["step 7", "terminate called", "  what():  bad device", "Fatal Python error: Aborted"]
    kept = [*head, "Current thread 0x02 (most recent call first):", *frames]
    assert list(failure.last_lines) == kept[:LAST_LINES]
    assert list(failure.telling_lines(12)) == kept[:12]


def test_a_crash_without_a_stack_of_python_keeps_what_is_there() -> None:
    lines = ["Fatal Python error: Segmentation fault", "<no Python frame>"]
    assert here(-11, node_rank=0, lines=lines).last_lines == tuple(lines)


def test_of_a_stack_the_innermost_frames_are_shown_and_it_is_called_one() -> None:
    stack = tuple(f"train.py:{line} in level{line}" for line in range(20))
    stalled = died(2, None, kind="stalled")
    failure = replace(stalled, reason="stalled: in its step for 9 s", last_lines=stack)
    assert failure.telling_lines(3) == stack[:3]
    assert (failure.short, failure.sentence) == (
        "rank 2 on n1 stalled",
        "rank 2 on n1 stalled: in its step for 9 s",
    )
    assert "Its stack:\n    train.py:0 in level0" in as_error(failure, Path("rank-2.log")).message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): 'a'.\n\tMore.",
            "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): 'a'. (a.py:1 in f)",
        ),
        ("ValueError: \nno such sample", "ValueError: no such sample (a.py:1 in f)"),
        ("ValueError: one\ntwo", "ValueError: one (a.py:1 in f)"),
        ("ValueError:", "ValueError: (a.py:1 in f)"),
    ],
)
def test_a_message_that_ends_with_a_colon_includes_its_next_line(line: str, reason: str) -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{line}\n'
    assert find_cause(1, None, tail_of(text)).reason == reason


def test_a_data_worker_that_left_is_named_with_its_code() -> None:
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    text = (
        f"{raised}RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are "
        "lost.\nThe above exception was the direct cause of the following exception:\n"
        f"{raised}RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
    )
    cause = find_cause(1, None, tail_of(text))
    assert cause == Cause("ended_worker", "a data worker ended by itself, with exit code 3")
    assert "train.workers=0" in ADVICE[cause.kind]
    assert "train.workers=0" in ADVICE["crashed_worker"]
    outlived = f"{text}step 7\n{raised}KeyError: 'lr'\n"
    assert find_cause(1, None, tail_of(outlived)).reason == "KeyError: 'lr' (a.py:1 in f)"


NCCL = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread ended with exception: {said}
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkAndSetException() + 0x21 (0x7f in libtorch_cuda.so)
frame #2: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0x978 (0x7f in libtorch_cuda.so)
frame #3: clone + 0x5f (0x7f in libc.so.6)
Fatal Python error: Aborted
Current thread 0x02 (most recent call first):
  File "/home/me/train.py", line 7 in step
Extension modules: numpy, torch
"""


@pytest.mark.parametrize(
    "line",
    [
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    ],
)
def test_a_rank_that_nccl_ends_because_of_others_is_not_the_first(line: str) -> None:
    failure = here(-6, node_rank=0, rank=0, lines=tail_of(NCCL.format(said=line)))
    assert failure.reason.startswith("lost another rank: [PG ID 0")
    assert is_consequence(failure)
    assert not is_consequence(here(-6, node_rank=0, rank=0, lines=crash(3))), "its own abort"


def test_of_failures_alike_the_earlier_is_the_cause() -> None:
    assert likely_first([died(0, 1, 7.2), died(3, 1, 7.1)]).rank == 3


def test_who_left_with_0_is_the_cause_if_all_others_only_lost_a_peer() -> None:
    left = died(1, 0, 7.0)
    assert likely_first([died(0, 1, 6.9, LOST), left, died(2, 1, 6.9, LOST)]) == left
    raised = died(2, 1, 8.0, "ValueError: no")
    assert likely_first([died(0, 1, 6.9, LOST), left, raised]) == raised
    assert is_consequence(left), "no better cause is known"
    assert node_code(left) == 1


def test_a_node_that_slurm_ended_for_want_of_memory_was_not_lost(folder: RunFolder) -> None:
    capture.record(folder, 0, LOST_NODE)
    folder.add_event("ended", attempt=0, lost={1: "n2"})
    assert read_failure(folder, 0) == LOST_NODE
    (folder.log_dir(0) / "batch.log").write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n"
    )
    failure = read_failure(folder, 0)
    assert failure is not None
    assert failure.sentence == "the agent on n2 was killed by SIGKILL: out of memory: SLURM reports it"


def test_a_hang_stays_the_cause_if_an_agent_could_not_end_its_ranks(folder: RunFolder) -> None:
    stalled = died(3, None, kind="stalled_together")
    capture.record(folder, 0, stalled)
    folder.add_event("ended", attempt=0, lost={1: "n2"})
    assert read_failure(folder, 0) == stalled


def test_a_stack_ends_where_the_rank_was_begun() -> None:
    text = (
        "Current thread 0x00008f (most recent call first):\n"
        '  File "/home/me/train.py", line 41 in step\n'
        '  File "/x/slurmddp/launchers/agent/worker.py", line 150 in _run_entry\n'
        '  File "/x/slurmddp/launchers/agent/agent.py", line 105 in run\n'
    )
    assert main_thread(text) == ("/home/me/train.py:41 in step",)


def test_the_log_of_a_lost_node_is_the_one_to_open(folder: RunFolder) -> None:
    for name in ("rank-0.log", "node-0.log", "node-1.log"):
        (folder.log_dir(0) / name).write_text("...\n")
    folder.config_file.write_text("name: test\n")
    folder.add_event("started", attempt=0, job_id="7", nodes="n[1-2]", launcher="slurm")
    capture.record(folder, 0, LOST_NODE)
    assert status(folder, None).log == folder.log_dir(0) / "node-1.log"
