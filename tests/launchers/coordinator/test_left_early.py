"""A rank that exits with 0 while others still need it is named as the cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmddp.launchers.coordinator.messages import HangSuspected, StacksReported, StartWorkers, WorkersFailed
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure
from support.runs.agent_runs import AGENT, make_run, start_agent
from support.runs.coordinator_attempts import LOST_PEER, Attempt, failed, to_all

PROGRAM = """
import os, pathlib, time

def main(run_dir):
    if os.environ["RANK"] == "1":
        return 0
    while not pathlib.Path(run_dir, "KNOWN").exists():
        time.sleep(0.01)
    print("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711")
    return 1
"""
TELLS = (
    """
import pathlib, sys
from slurmddp.launchers.coordinator.coordinator import Coordinator

receive = Coordinator.receive

def receive_and_tell(self, sender, message, now):
    receive(self, sender, message, now)
    if getattr(message, "left", ()):
        pathlib.Path(sys.argv[1], "told").touch()

Coordinator.receive = receive_and_tell
"""
    + AGENT
)
"""An agent that leaves a file once the coordinator knows of a rank that has left."""


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "known"), [(1, 2, "logs/attempt-0/exit-rank-1"), (2, 1, "told")]
)
def test_a_rank_that_left_is_named_and_not_the_one_that_lost_it(
    tmp_path: Path, nodes: int, ranks_per_node: int, known: str
) -> None:
    program = PROGRAM.replace("KNOWN", known)
    folder = make_run(tmp_path, program, nodes=nodes, ranks_per_node=ranks_per_node)
    (tmp_path / "tells.py").write_text(TELLS)
    command = [sys.executable, str(tmp_path / "tells.py")]
    agents = [start_agent(folder, nodes=nodes, node_rank=node, command=command) for node in range(nodes)]
    try:
        assert agents[0].wait(timeout=120) == 1
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.exit_code) == (1, 0)
    assert found.sentence.endswith("ended with exit code 0: left while others continued")
    assert "same number of steps" in found.advice


def left(rank: int) -> Failure:
    return Failure(rank=rank, host=f"n{rank}", exit_code=0, signal=None, kind="left_early")


def in_a_collective(rank: int) -> RankReport:
    facts = {"rank": rank, "host": f"n{rank}", "phase": "step", "step": 7, "seconds": 400.0, "limit_s": 300.0}
    stack = ("/x/torch/distributed/c10d.py:7 in all_reduce", "/home/me/a.py:1 in step")
    return RankReport(**facts, stack=stack)  # type: ignore[arg-type]


def test_of_a_standstill_the_rank_that_left_is_the_cause() -> None:
    attempt = Attempt().begin()
    attempt.orders(1, HangSuspected)
    for node in (0, 1):
        attempt.orders(node, StacksReported, reports=[in_a_collective(node)])
    attempt.orders(2, StacksReported, reports=[], left=[left(5)])
    attempt.killed(0)
    attempt.killed(1)
    assert attempt.killed(2) == to_all(StartWorkers, 0, 1, 2)
    assert ("group_failed", 0, 5) in attempt.notes.done


def test_what_was_told_of_ranks_before_says_nothing_of_those_in_their_places() -> None:
    attempt = Attempt().begin()
    lost = [failed(0, code=1, lines=LOST_PEER)]
    for restart_count, gone, named in ((0, [left(5)], 5), (1, [], 0)):
        attempt.orders(
            0, WorkersFailed, failures=lost, restart_count=restart_count, step=7 + restart_count, left=gone
        )
        for node in (0, 1, 2):
            attempt.killed(node, restart_count=restart_count)
        assert ("group_failed", restart_count, named) in attempt.notes.done
