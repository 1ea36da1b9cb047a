"""Find the processes of a run, agents and their ranks, by their command lines."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


def processes_of(folder: Path, attempt: int | None = None) -> dict[int, psutil.Process]:
    """Return a run's agents and ranks, of one attempt or of all, by pid; forks keep the command line."""
    command = ["-m", "slurmddp.launchers.agent", str(folder)]
    running = {}
    for process in psutil.process_iter():
        try:
            mine = process.cmdline()[1:] == command
            if mine and attempt in (None, int(process.environ()["SLURMDDP_ATTEMPT"])):
                running[process.pid] = process
        except psutil.Error:
            continue

    return running


def agent_of(folder: Path, attempt: int, node_rank: int) -> psutil.Process:
    processes = processes_of(folder, attempt)
    (agent,) = (
        process
        for process in processes.values()
        if process.ppid() not in processes and process.environ()["SLURM_NODEID"] == str(node_rank)
    )
    return agent


def ranks_of(folder: Path, attempt: int | None = None) -> list[psutil.Process]:
    """Return the agents' children that lead a process group in their agent's session, in their order.

    A rank is a fork of its agent, or another program with another command line.
    """
    ranks: list[tuple[int, int, psutil.Process]] = []
    for agent in processes_of(folder, attempt).values():
        with suppress(psutil.Error, ProcessLookupError):  # It may end meanwhile.
            for child in agent.children():
                if os.getpgid(child.pid) == child.pid != os.getsid(child.pid):
                    ranks.append((int(child.environ()["SLURM_NODEID"]), child.pid, child))

    return [rank for _, _, rank in sorted(ranks, key=lambda entry: entry[:2])]
