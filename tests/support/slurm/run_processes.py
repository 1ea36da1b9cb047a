"""The processes of a run: agents and their ranks, found by their command line."""

from __future__ import annotations

import os

import psutil

from support.slurm.train_project import Run


def processes_of(run: Run, attempt: int | None = None) -> dict[int, psutil.Process]:
    """Return a run's agents and ranks, of one attempt or of all, by pid; a fork keeps its parent's words."""
    words, found = ["-m", "slurmddp.launchers.agent", str(run.folder)], {}
    for process in psutil.process_iter():
        try:
            mine = process.cmdline()[1:] == words
            if mine and attempt in (None, int(process.environ()["SLURMDDP_ATTEMPT"])):
                found[process.pid] = process
        except psutil.Error:
            continue
    return found


def agent_of(run: Run, attempt: int, node_rank: int) -> psutil.Process:
    processes = processes_of(run, attempt)
    (agent,) = (
        process
        for process in processes.values()
        if process.ppid() not in processes and process.environ()["SLURM_NODEID"] == str(node_rank)
    )
    return agent


def ranks_of(run: Run) -> list[psutil.Process]:
    """Return the agents' children that lead a process group in their agent's session."""
    processes = processes_of(run)
    below = [process for process in processes.values() if process.ppid() in processes]
    return [one for one in below if os.getpgid(one.pid) == one.pid != os.getsid(one.pid)]
