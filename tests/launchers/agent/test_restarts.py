"""Ranks that die restart in place, on all nodes, or the attempt ends; ranks here need no torch."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from slurmddp.runs.failures import capture
from support.runs.agent_runs import AGENT, all_gone, children_of, events, runs, start_agent, wait_until
from support.runs.restarting_runs import (
    STEPPING,
    agents_of,
    begun,
    codes,
    lines_of,
    node_log,
    pid_of,
    run_folder,
)

IMPATIENT = """
from slurmddp.launchers.agent.without_link import LinkWait
from slurmddp.launchers.coordinator.join import JoinWait

def hurry(wait, is_time):
    poll, passed = wait.poll, []

    def poll_later(self, now, *nodes):
        if is_time(*nodes):
            passed.append({seconds})
        return poll(self, now + sum(passed), *nodes)

    wait.poll = poll_later

hurry(JoinWait, lambda present, gone: len(present) == 2)
hurry(LinkWait, lambda: True)
"""
"""An agent for which some seconds pass at each look once two nodes are here, however slow the machine is."""


def impatient(tmp_path: Path, seconds: int) -> list[str]:
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT.replace("{seconds}", str(seconds)) + AGENT)
    return [sys.executable, str(script)]


def test_a_killed_rank_begins_again_with_all_others_until_the_run_is_at_its_end(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2)
    with agents_of(folder, 2) as agents:
        wait_until(lambda: begun(folder, 0, 4), "the first start of the ranks")
        old = [child for agent in agents for child in children_of(agent.pid)]
        os.kill(pid_of(folder, 3), signal.SIGKILL)
        wait_until(lambda: begun(folder, 1, 4), "the second start of the ranks")
        first = {pid_of(folder, rank, 0) for rank in range(4)}
        assert all_gone([one for one in old if one.pid in first])
        (folder.path / "fail-1-0").touch()
        wait_until(lambda: begun(folder, 2, 4), "the third start of the ranks")
        (folder.path / "finish").touch()
        assert codes(agents) == [0, 0]
    assert not folder.failure_file(0).exists()
    killed, broken = (json.loads((folder.log_dir(0) / f"failure-g{g}.json").read_text()) for g in range(2))
    assert (killed["rank"], killed["signal"], killed["node_rank"]) == (3, "SIGKILL", 1)
    assert (broken["rank"], broken["exit_code"]) == (0, 1)
    assert broken["last_lines"][-1] == "ValueError: it is broken"
    assert [event["restart_count"] for event in events(folder, "rank_failed")] == [0, 1]
    first, second = events(folder, "restarted")
    assert (first["restart_count"], first["node"], first["rank"], first["step"]) == (1, 1, 3, 5)
    assert (second["restart_count"], second["rank"], second["step"]) == (2, 0, 15)
    assert {one[4].rpartition(".")[2] for one in lines_of(folder, 0)} == {"g0", "g1", "g2"}
    assert [(folder.log_dir(0) / f"exit-node-{node}").read_text() for node in range(2)] == ["0\n", "0\n"]


def test_a_restart_that_gets_no_further_is_the_last(tmp_path: Path) -> None:
    """A bug at one step: the same ranks would fail there again and again."""
    program = STEPPING.replace("resumed = 10 * restart_count", "resumed = 0")
    folder = run_folder(tmp_path, program=program)
    with agents_of(folder, 1) as agents:
        wait_until(lambda: begun(folder, 0, 2), "the first start of the ranks")
        for restart_count in range(2):
            (folder.path / f"fail-{restart_count}-1").touch()
        assert codes(agents) == [1]
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.restart_count, found.rank) == (1, 1)
    assert len(events(folder, "restarted")) == 1
    assert "no step was completed beyond step 5" in node_log(folder)


def test_after_a_stop_nothing_begins_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, program=STEPPING.replace("        if stop:\n            return 75\n", ""))
    with agents_of(folder, 1) as agents:
        wait_until(lambda: begun(folder, 0, 2), "the first start of the ranks")
        agents[0].terminate()
        wait_until(lambda: "received SIGTERM" in node_log(folder), "the agent has heard it")
        os.kill(pid_of(folder, 0), signal.SIGKILL)
        assert codes(agents) == [1]
    assert not events(folder, "restarted")
    assert "the run was asked to stop" in node_log(folder)


def test_a_node_that_does_not_come_is_named_and_ends_the_attempt(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=3)
    agents = [
        start_agent(folder, nodes=3, node_rank=0, command=impatient(tmp_path, 200)),
        start_agent(folder, nodes=3, node_rank=2),
    ]
    assert codes(agents) == [1, 1]
    log = node_log(folder)
    assert "waiting for node 1 (localhost); 2 of 3 nodes have joined" in log
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.node_rank, found.rank) == (1, None)
    assert "did not join within 300 s" in found.reason
    assert not folder.rank_log(0, 0).exists(), "no rank was started"


def test_without_node_0_the_others_wait_and_leave(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2)
    agents = [start_agent(folder, nodes=2, node_rank=1, command=impatient(tmp_path, 200))]
    assert codes(agents) == [1]
    assert "waiting for node 0 (localhost)" in node_log(folder, 1)
    found = capture.read(folder, 0)
    assert found is not None
    assert found.node_rank == 0


def test_an_agent_that_comes_when_all_is_over_leaves_like_the_first_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    folder.log_dir(0).mkdir(parents=True)
    (folder.log_dir(0) / "exit-node-0").write_text("0\n")
    with agents_of(folder, 3, first=2) as agents:
        assert codes(agents) == [0]
    assert not folder.failure_file(0).exists(), "a run that has finished stays so"


def test_a_stop_while_the_agents_wait_for_each_other(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=3)
    agents = [
        start_agent(folder, nodes=3, node_rank=0, command=impatient(tmp_path, 4)),
        start_agent(folder, nodes=3, node_rank=2),
    ]
    wait_until(lambda: "waiting for node 1" in node_log(folder), "the first node has noticed")
    agents[1].terminate()
    assert codes(agents) == [75, 75]
    assert not folder.failure_file(0).exists()


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    with agents_of(folder, 3) as agents:
        wait_until(lambda: begun(folder, 0, 4), "the first start of the ranks")
        wait_until(lambda: "this node waits" in node_log(folder, 2), "the spare is there")
        lost = children_of(agents[1].pid)
        agents[1].kill()
        wait_until(lambda: begun(folder, 1, 4), "the second start of the ranks")
        assert {psutil.Process(pid_of(folder, rank)).ppid() for rank in (2, 3)} == {agents[2].pid}
        wait_until(lambda: not any(runs(one) for one in lost), "what the lost agent had started ends")
        (folder.path / "finish").touch()
        assert codes([agents[0], agents[2]]) == [0, 0]
    (event,) = events(folder, "restarted")
    assert (event["node"], event["rank"], event["spare"]) == (1, None, [2])
    assert [event["without"] for event in events(folder, "continued")] == [[1]]
    assert not folder.failure_file(0).exists()
    assert (folder.log_dir(0) / "exit-node-2").read_text() == "0\n"


def test_with_elastic_the_others_go_on_without_a_lost_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=3, elastic=True, train={"global_batch": 12})
    with agents_of(folder, 3) as agents:
        wait_until(lambda: begun(folder, 0, 6), "the first start of the ranks")
        agents[1].kill()
        wait_until(lambda: begun(folder, 1, 4), "the second start of the ranks")
        assert {one[3] for rank in range(4) for one in lines_of(folder, rank) if one[0] == 1} == {4}
        (folder.path / "finish").touch()
        assert codes([agents[0], agents[2]]) == [0, 0]
    (event,) = events(folder, "restarted")
    assert event["nodes"] == 2


def test_a_lost_node_without_another_ends_the_attempt_as_its_failure(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2)
    with agents_of(folder, 2) as agents:
        wait_until(lambda: begun(folder, 0, 4), "the first start of the ranks")
        agents[1].kill()
        assert codes([agents[0]]) == [1]
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.node_rank, found.rank) == (1, None)
    assert found.kind == "lost_node"
    assert not (folder.log_dir(0) / "exit-node-1").exists()


@pytest.mark.parametrize("spares", [0, 1])
def test_without_the_first_node_the_others_end_their_ranks(tmp_path: Path, spares: int) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=spares)
    with agents_of(folder, 2 + spares) as agents:
        wait_until(lambda: begun(folder, 0, 4), "the first start of the ranks")
        agents[0].kill()
        assert codes(agents[1:]) == [1, 75][: 1 + spares]
    found = capture.read(folder, 0)
    if spares:
        assert found is None, "node 0 may have lost only this one, and go on"
    else:
        assert found is not None
        assert found.node_rank == 0
