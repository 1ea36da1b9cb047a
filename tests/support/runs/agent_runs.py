"""Run folders and agents without torch: the ranks run a small program that a test writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from slurmddp.environments.emit import emulated_step
from slurmddp.environments.scrub import scrub
from slurmddp.host.process import REAPER_NAME
from slurmddp.runs.folder.layout import RunFolder

SAVING = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
stop = []

def flag(number, frame):
    stop.append(signal.Signals(number).name)

def main(run_dir):
    signal.signal(signal.SIGTERM, flag)
    signal.signal(signal.SIGUSR2, flag)
    print("rank", rank, "ready", flush=True)
    while not stop:
        time.sleep(0.01)
    print("saved after", stop[0], flush=True)
    return 75
"""
"""A program whose ranks run until a request to stop, and then save."""

AGENT = """
import os, sys
from slurmddp.launchers.agent.agent import run
os._exit(run(sys.argv[1], entry="rank_program:main", preload=()))
"""


def make_run(
    tmp_path: Path, program: str, /, *, nodes: int = 1, ranks_per_node: int = 2, **config: Any
) -> RunFolder:
    """Return a run folder of `config` whose project holds `program` as the module `rank_program`."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "rank_program.py").write_text(program)
    folder = RunFolder(tmp_path / "runs" / "test-00000000")
    folder.path.mkdir(parents=True)
    config |= {"nodes": nodes, "ranks_per_node": ranks_per_node, "project_dir": str(project)}
    folder.config_file.write_text(yaml.safe_dump(config))
    return folder


def agent_command(tmp_path: Path) -> list[str]:
    script = tmp_path / "start_agent.py"
    if not script.exists():  # An agent that was started a moment ago may be about to read it.
        script.write_text(AGENT)
    return [sys.executable, str(script)]


def start_agent(
    folder: RunFolder,
    *,
    attempt: int = 0,
    nodes: int = 1,
    node_rank: int = 0,
    command: Sequence[str] = (),
    **environ: str,
) -> subprocess.Popen[bytes]:
    """Start one agent as the local launcher would."""
    folder.log_dir(attempt).mkdir(parents=True, exist_ok=True)
    environ = scrub(os.environ) | emulated_step(nodes, node_rank, "local-1", folder.path, attempt) | environ
    command = [*(command or agent_command(folder.path.parent)), str(folder.path)]
    with (folder.log_dir(attempt) / f"node-{node_rank}.log").open("ab") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120) -> None:
    """Wait for `condition`; the limit only ends a test that hangs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def wait_for_lines(folder: RunFolder, text: str, ranks: int, attempt: int = 0) -> None:
    """Wait until the log of each rank holds `text`."""
    for rank in range(ranks):
        log = folder.rank_log(attempt, rank)
        wait_until(lambda log=log: log.exists() and text in log.read_text(), f"{text!r} in {log.name}")


def events(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind that the run's attempts have left."""
    return [event for event in folder.events() if event["event"] == kind]


def children_of(pid: int) -> list[psutil.Process]:
    """Return the processes below an agent, without its reaper."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if process.name() != REAPER_NAME]


def runs(process: psutil.Process | int) -> bool:
    """Return whether a process runs.

    A zombie does not run: pid 1 removes the zombies of orphans at any time.
    """
    try:
        handle = psutil.Process(process) if isinstance(process, int) else process
        return handle.is_running() and handle.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(processes: list[psutil.Process]) -> bool:
    """Return whether all processes are gone, zombies included."""
    return not any(process.is_running() for process in processes)
