"""A node whose agent can't get as far as its ranks: the others begin without it, where they may. No torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import AGENT, events, wait_until
from support.runs.restarting_runs import agents_of, codes, lines_of, node_log, run_folder

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
    assert [event["without"] for event in events(folder, "continued")] == [[1]]
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
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.node_rank, found.exit_code) == (unable[0], 78)
    assert "surely_not_there can't be imported" in found.reason


def test_without_a_spare_that_is_left_the_attempt_ends_as_with_a_lost_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    with with_unable(folder, 3, 1, 2) as agents:
        assert codes(agents) == [1, 1, 1]
    found = capture.read(folder, 0)
    assert found is not None
    assert found.node_rank in (1, 2)
    assert "surely_not_there can't be imported" in found.reason


REFUSALS = {
    "a name that does not resolve": (
        {},
        "from slurmddp.errors import MismatchError\nfrom slurmddp.launchers.link import member\n"
        "def unknown(info):\n    raise MismatchError('It does not resolve here.')\n"
        "member.find_rank_zero = unknown\n" + AGENT,
        "does not resolve",
    ),
    "variables that contradict each other": ({"SLURMDDP_ENVIRONMENT": "slrum"}, AGENT, "slrum"),
    "an unreadable configuration": (
        {},
        "from slurmddp.errors import ConfigError\nfrom slurmddp.runs.folder.layout import RunFolder\n"
        "def unreadable(folder):\n    raise ConfigError('The configuration can not be read here.')\n"
        "RunFolder.config = unreadable\n" + AGENT,
        "can not be read here",
    ),
    "no process left for the reaper": (
        {},
        "from slurmddp.launchers.agent import agent\ndef fails():\n    raise OSError(11, 'no process')\n"
        "agent.OrphanReaper = fails\n" + AGENT,
        "no process",
    ),
}


def refusing(folder: RunFolder, nodes: int, kind: str) -> AbstractContextManager[list[Popen[bytes]]]:
    """Start the agents of all nodes; node 1's ends before it has a link to node 0."""
    environ, text, _ = REFUSALS[kind]
    script = folder.path / "refusing.py"
    script.write_text(text)
    command = ["env", *(f"{name}={value}" for name, value in environ.items()), sys.executable, str(script)]
    return agents_of(folder, nodes, commands={1: command})


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_node_that_refuses_before_it_has_a_link_does_not_end_the_others(tmp_path: Path, kind: str) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    with refusing(folder, 3, kind) as agents:
        wait_until(lambda: all(begun_on_two_nodes(folder, rank) for rank in range(4)), "ranks on two nodes")
        (folder.path / "finish").touch()
        assert codes(agents)[::2] == [0, 0]
    assert not folder.failure_file(0).exists()
    assert [event["without"] for event in events(folder, "continued")] == [[1]]
    (told,) = [event for event in folder.events() if event["event"] == "warned"]
    assert REFUSALS[kind][2] in told["text"]


@pytest.mark.parametrize("kind", REFUSALS)
def test_where_all_nodes_are_needed_an_early_refusal_ends_the_attempt_at_once(
    tmp_path: Path, kind: str
) -> None:
    folder = run_folder(tmp_path, nodes=2)
    with refusing(folder, 2, kind) as agents:
        codes(agents)
    found = capture.read(folder, 0)
    assert found is not None
    assert found.node_rank == 1
    assert REFUSALS[kind][2] in found.reason + " ".join(found.last_lines)


def test_a_signal_ends_the_wait_of_a_node_that_can_run_no_ranks(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1)
    script = folder.path / "unable.py"
    script.write_text(UNABLE)
    # Node 0 never starts, so nobody answers.
    commands = {1: [sys.executable, str(script)], 2: ["true"]}
    with agents_of(folder, 3, first=1, commands=commands) as agents:
        wait_until(lambda: "surely_not_there can't be imported" in node_log(folder, 1), "the refusal")
        agents[0].terminate()
        assert agents[0].wait(timeout=120) != 0
    assert not folder.failure_file(0).exists()
