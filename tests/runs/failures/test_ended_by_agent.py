"""Ranks that their own agent has ended are no cause of a failure."""

from __future__ import annotations

from pathlib import Path

from slurmddp.runs.failures.read import rank_exits, read_failure
from support.runs.agent_runs import make_run, start_agent, wait_for_lines

DEAF = """
import os, signal, time
def main(run_dir):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while not os.path.exists(f"{run_dir}/fail-{os.environ['RANK']}"):
        time.sleep(0.01)
    return 3
"""


def test_a_rank_that_is_ended_because_node_0_is_lost_is_not_the_failure(tmp_path: Path) -> None:
    folder = make_run(tmp_path, DEAF, nodes=2, ranks_per_node=1)
    folder.config_file.write_text(folder.config_file.read_text() + "elastic: true\n")
    agents = [start_agent(folder, nodes=2, node_rank=node) for node in (0, 1)]
    wait_for_lines(folder, "ready", 2)
    agents[0].kill()
    assert agents[1].wait(timeout=60) == 1
    agents[0].wait()
    (end,) = rank_exits(folder, 0)
    assert (end.rank, end.signal) == (1, "SIGKILL")
    assert read_failure(folder, 0) is None


def test_a_rank_that_failed_by_itself_is_though_its_agent_could_not_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, DEAF, ranks_per_node=2)
    agent = start_agent(folder, nodes=1, node_rank=0)
    wait_for_lines(folder, "ready", 2)
    (folder.path / "fail-1").touch()
    assert agent.wait(timeout=60) == 1
    folder.failure_file(0).unlink()
    found = read_failure(folder, 0)
    assert found is not None
    assert (found.rank, found.exit_code) == (1, 3)
