"""Ranks without torch that their agents restart in place, and the lines that these ranks print."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import make_run, start_agent

STEPPING = """
import json, os, signal, sys, time
from slurmddp.environments.detect import detect
from slurmddp.host.heartbeat_page import HeartbeatPage

rank, restart_count = int(os.environ["RANK"]), int(os.environ["SLURMDDP_RESTART_COUNT"])
stop = []

def main(run_dir):
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    page = HeartbeatPage.attach(os.environ)
    info = detect(os.environ)
    resumed = 10 * restart_count
    page.resumed(resumed)
    page.completed(resumed + 5, 0.1, 0.0)
    print(json.dumps([restart_count, os.getpid(), rank, info.world_size, info.launch_id]), flush=True)
    while not os.path.exists(f"{run_dir}/finish"):
        if stop:
            return 75
        if os.path.exists(f"{run_dir}/fail-{restart_count}-{rank}"):
            raise ValueError("it is broken")
        time.sleep(0.01)
    return 0
"""
"""Program whose ranks take some steps, more after each restart, and then wait for a file to end."""


def run_folder(tmp_path: Path, *, nodes: int = 1, program: str = STEPPING, **config: object) -> RunFolder:
    return make_run(tmp_path, program, nodes=nodes, **config)


@contextmanager
def agents_of(
    folder: RunFolder,
    nodes: int,
    first: int = 0,
    commands: Mapping[int, Sequence[str]] = MappingProxyType({}),
    **options: Any,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the agents of the nodes from `first` on; `commands` contains other commands for some nodes."""
    agents = [
        start_agent(folder, nodes=nodes, node_rank=node, command=commands.get(node, ()), **options)
        for node in range(first, nodes)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def lines_of(folder: RunFolder, rank: int) -> list[list]:
    log = folder.rank_log(0, rank)
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.startswith("[") and line.endswith("]")]


def begun(folder: RunFolder, restart_count: int, ranks: int) -> bool:
    return all([line for line in lines_of(folder, rank) if line[0] == restart_count] for rank in range(ranks))


def pid_of(folder: RunFolder, rank: int, line: int = -1) -> int:
    return lines_of(folder, rank)[line][1]


def node_log(folder: RunFolder, node: int = 0) -> str:
    return (folder.log_dir(0) / f"node-{node}.log").read_text()


def codes(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    return [agent.wait(timeout=120) for agent in agents]
