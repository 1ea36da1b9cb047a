"""A rank that hangs at its exit after all others have left well is ended; one that still works is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.host import process
from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.coordinator.messages import EndHungRanks, Fail, HungAtExit, Leave, WorkersDone
from slurmddp.launchers.watchdog.exit_watch import Activity, ExitWatch, read_activity
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import events, wait_until
from support.runs.coordinator_attempts import Attempt, to_all
from support.runs.restarting_runs import agents_of, codes, node_log, run_folder

HANGS = """
import atexit, os, pathlib, threading, time

def hang(hangs):
    lock = threading.Lock()
    lock.acquire()
    hangs.touch()
    lock.acquire()

def main(run_dir):
    hangs = pathlib.Path(run_dir, "hangs")
    if os.environ["RANK"] == "1":
        atexit.register(hang, hangs)
    else:
        while not hangs.exists():
            time.sleep(0.01)
    return {code}
"""
BEAT = RankHeartbeat("starting", 0.0, -1, -1, 0, 0.0, 0.0, 0.0)
COMPUTES = "while True: sum(range(1000))"
WORK = {
    "computes": COMPUTES,
    "computes in a child": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])",
    "writes": "import os, time\nwhile True: os.write(1, b'a line'); time.sleep(0.01)",
}


def ends_of(folder: RunFolder, nodes: int) -> list[int]:
    with agents_of(folder, nodes) as agents:
        return codes(agents)


@pytest.mark.parametrize(("nodes", "ranks_per_node", "code"), [(2, 1, 75), (2, 2, 0)])
def test_a_rank_that_hangs_at_its_exit_is_ended_and_the_result_of_the_others_stands(
    tmp_path: Path, nodes: int, ranks_per_node: int, code: int
) -> None:
    program = HANGS.replace("{code}", str(code))
    folder = run_folder(
        tmp_path, nodes=nodes, program=program, ranks_per_node=ranks_per_node, policy={"stall_timeout_s": 2}
    )
    assert ends_of(folder, nodes) == [code] * nodes
    assert read_failure(folder, 0) is None
    (warned,) = events(folder, "warned")
    assert warned["text"].startswith("rank 1 on ")
    assert "hung at its exit" in warned["text"]
    assert "in hang" in warned["text"], "where it stood"
    assert warned["text"] in node_log(folder)
    assert "in hang" in (folder.log_dir(0) / "stacks-rank-1.txt").read_text()


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_rank_that_works_on_after_the_others_is_left_alone(work: str) -> None:
    watch, now = ExitWatch(2.0), 100.0
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as rank:
        try:
            for _ in range(6):
                # A second of the watch passes whenever the process has got the processor for a while.
                before = read_activity(rank.pid)
                wait_until(lambda before=before: worked(before, read_activity(rank.pid)), "the rank works")
                assert not watch.poll({1: (rank.pid, BEAT)}, now)
                now += 1.0
            assert watch.silent_s == 0.0
        finally:
            os.killpg(rank.pid, signal.SIGKILL)


def worked(before: Activity, now: Activity) -> bool:
    return now.cpu_s > before.cpu_s + 0.2 or now.io_bytes > before.io_bytes


def report(stack: list[str], rank: int = 2) -> RankReport:
    facts = {"rank": rank, "host": f"n{rank}", "phase": "starting", "step": -1, "seconds": 30.0}
    return RankReport(**facts, limit_s=None, stack=tuple(stack))  # type: ignore[arg-type]


AT_EXIT = ["/home/me/train.py:87 in main"]
IN_DESTROY = [
    "/x/torch/distributed/distributed_c10d.py:2245 in _shutdown_backend",
    "/x/torch/distributed/distributed_c10d.py:2313 in destroy_process_group",
    "/home/me/train.py:87 in main",
]
IN_A_COLLECTIVE = ["/x/torch/distributed/distributed_c10d.py:4818 in barrier", "/home/me/train.py:80 in main"]


@pytest.mark.parametrize("stack", [AT_EXIT, IN_DESTROY, []])
def test_the_last_rank_is_ended_once_all_others_have_left(stack: list[str]) -> None:
    attempt = Attempt().begin()
    attempt.orders(0, WorkersDone, code=0)
    assert attempt.orders(2, HungAtExit, reports=[report(stack)]) == []
    assert attempt.orders(1, WorkersDone, code=0) == [(2, EndHungRanks)]
    assert attempt.orders(2, WorkersDone, code=0) == to_all(Leave)
    assert "hung at its exit" in attempt.notes.lines[0]


def test_ranks_that_work_again_are_not_ended() -> None:
    attempt = Attempt().begin()
    attempt.orders(0, WorkersDone, code=0)
    attempt.orders(2, HungAtExit, reports=[report(AT_EXIT)])
    attempt.orders(2, HungAtExit, reports=[])
    assert attempt.orders(1, WorkersDone, code=0) == []


def test_nothing_is_ended_where_no_rank_has_left() -> None:
    attempt = Attempt().begin()
    orders = [attempt.orders(agent, HungAtExit, reports=[report(AT_EXIT, agent)]) for agent in (0, 1, 2)]
    assert orders == [[], [], []]


def test_a_rank_that_waits_in_a_collective_is_a_failure() -> None:
    attempt = Attempt().begin()
    attempt.orders(0, WorkersDone, code=0)
    attempt.orders(1, WorkersDone, code=0)
    assert attempt.orders(2, HungAtExit, reports=[report(IN_A_COLLECTIVE)]) == []
    attempt.coordinator.poll(1.4)
    assert attempt.taken_orders() == to_all(Fail)
    assert attempt.notes.done == [("stalled", 0, 2), ("failed", 2, 2)]


def silent_s(
    shown: Sequence[tuple[Activity, RankHeartbeat]], timeout_s: float | None = 3.0
) -> tuple[bool, float]:
    """Return what a watch says that looked once a second."""
    activities = iter([activity for activity, _ in shown])
    now, hung, watch = 100.0, False, ExitWatch(timeout_s, lambda pid: next(activities))
    for _, beat in shown:
        hung, now = watch.poll({1: (4711, beat)}, now), now + 1.0
    return hung, watch.silent_s


@pytest.mark.parametrize(
    ("last", "beat"),
    [
        (Activity(cpu_s=0.2), BEAT),
        (Activity(io_bytes=1), BEAT),
        (Activity(pids=frozenset({5})), BEAT),
        (Activity(held=True), BEAT),
        (Activity(), replace(BEAT, since=104.0)),
        (Activity(), replace(BEAT, steps=1)),
        (Activity(), replace(BEAT, phase="step", watched=True)),
    ],
)
def test_each_sign_of_life_counts(last: Activity, beat: RankHeartbeat) -> None:
    assert silent_s([(Activity(), BEAT)] * 5) == (True, 4.0)
    assert silent_s([*[(Activity(), BEAT)] * 4, (last, beat)]) == (False, 0.0)


def test_threads_that_wait_for_a_lock_are_no_work() -> None:
    assert silent_s([(Activity(cpu_s=0.05 * second), BEAT) for second in range(5)]) == (True, 4.0)


def test_a_time_out_of_0_ends_nothing() -> None:
    assert silent_s([(Activity(), BEAT)] * 5, timeout_s=0) == (False, 4.0)


@pytest.mark.parametrize(
    ("status", "held"),
    [
        ("Name:\tx\nState:\tS (sleeping)\nTracerPid:\t0\nUid:\t0\n", False),
        ("Name:\tx\nState:\tD (disk sleep)\nTracerPid:\t0\nUid:\t0\n", True),
        ("Name:\tx\nState:\tt (tracing stop)\nTracerPid:\t77\nUid:\t0\n", True),
    ],
)
def test_counters_of_all_descendants_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, held: bool
) -> None:
    monkeypatch.setattr(process, "PROC", tmp_path)
    for pid, parent in ((7, 1), (8, 7), (9, 8), (10, 1)):
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "status").write_text(status if pid in (9, 10) else "State:\tS\nTracerPid:\t0\n")
        (tmp_path / f"{pid}/stat").write_text(
            f"{pid} (a b) c) S {parent} 7 7 0 -1 0 0 0 0 0 10 20 30 40 20 0\n"
        )
        (tmp_path / f"{pid}/io").write_text("rchar: 5\nwchar: 6\nsyscr: 1\n")
    assert read_activity(7) == Activity(3.0, 33, frozenset({7, 8, 9}), held)
