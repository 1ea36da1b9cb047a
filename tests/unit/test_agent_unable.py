"""A node whose agent can't get as far as its ranks: the others begin without it, where they may. No torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
from agent_runs import AGENT, wait_until
from generation_runs import agents_of, codes, lines_of, node_log, run_folder

from slurmddp.launchers import failure
from slurmddp.runs.folder import RunFolder

UNABLE = AGENT.replace("preload=()", "preload=('surely_not_there',)")


def begun_on_two_nodes(folder: RunFolder, rank: int) -> bool:
    lines = lines_of(folder, rank)
    return bool(lines) and lines[-1][3] == 4 and psutil.pid_exists(lines[-1][1])


def with_unable(folder: RunFolder, nodes: int, *unable: int) -> AbstractContextManager[list[Popen[bytes]]]:
    """Start the agents of all nodes; those `unable` can't import what the ranks need."""
    script = folder.path / "unable.py"
    script.write_text(UNABLE)
    return agents_of(folder, nodes, commands={node: [sys.executable, str(script)] for node in unable})


@pytest.mark.parametrize("config", [{"nodes": 2, "spare_nodes": 1}, {"nodes": 3, "elastic": True}])
def test_the_others_begin_without_it(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = run_folder(tmp_path, **config)
    with with_unable(folder, 3, 1) as agents:
        # It may just have arrived when the ranks begin, and say only then that it can't.
        wait_until(lambda: all(begun_on_two_nodes(folder, rank) for rank in range(4)), "ranks on two nodes")
        (folder.path / "finish").touch()
        assert codes(agents) == [0, 1, 0]
    assert not folder.failure_file(0).exists()
    assert (folder.log_dir(0) / "replaced-node-1").exists()
    assert "surely_not_there can't be imported" in node_log(folder)
    told = [event for event in folder.events() if event["event"] in ("warned", "restarted")]
    assert all("surely_not_there" in event.get("text", event.get("reason", "")) for event in told)
    assert len(told) == 1
    assert "surely_not_there can't be imported" in node_log(folder, 1)


@pytest.mark.parametrize(
    ("config", "unable"), [({}, (1,)), ({"spare_nodes": 1}, (0,)), ({"elastic": True}, (0, 1))]
)
def test_where_they_may_not_it_is_the_failure_of_the_attempt(
    tmp_path: Path, config: dict[str, object], unable: tuple[int, ...]
) -> None:
    nodes = 3 if "spare_nodes" in config else 2
    folder = run_folder(tmp_path, nodes=2, **config)
    with with_unable(folder, nodes, *unable) as agents:
        codes(agents)
    found = failure.read(folder, 0)
    assert found is not None
    assert (found.node_rank, found.exit_code) == (unable[0], 78)
    assert "surely_not_there can't be imported" in found.reason


def test_without_a_spare_that_is_left_the_attempt_ends_as_with_a_lost_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    with with_unable(folder, 3, 1, 2) as agents:
        assert codes(agents) == [1, 1, 1]
    found = failure.read(folder, 0)
    assert found is not None
    assert found.node_rank in (1, 2)
    assert "surely_not_there can't be imported" in found.reason
