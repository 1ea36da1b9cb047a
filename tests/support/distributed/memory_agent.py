"""Child program of test_memory: forks generations of ranks as agents do, one rank on each of two nodes.

    PYTHONPATH=tests python -m support.distributed.memory_agent FOLDER

A node is a service here. Writes what the ranks of each scenario returned to FOLDER/found.pt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP would import it, in each rank.

from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.detect import detect
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.environments.names import CHANNEL_VARIABLE, MEMORY_VARIABLE
from slurmddp.host import process
from support.distributed import memory_jobs

NODES = 2
Job = Callable[..., Any]


def be_rank(folder: Path, environ: dict[str, str], job: Job, args: tuple[Any, ...]) -> None:
    code = 1
    try:
        os.environ.update(environ)
        torch.set_num_threads(1)
        torch.save(job(*args), folder / f"rank-{environ['RANK']}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def generation(
    number: int, folder: Path, services: list[CheckpointService], job: Job, *args: Any
) -> list[Any]:
    """Run one generation to its end; when a rank dies the others are killed. Return what each returned."""
    pids = {}
    for old in folder.glob("rank-*.pt"):
        old.unlink()
    for node_rank, service in enumerate(services):
        step = emulated_step(NODES, node_rank, "local-1", folder, number)
        environ = step | rank_environment(detect(step), 0, 1)
        environ[CHANNEL_VARIABLE] = str(service.channel_for(0))
        environ[MEMORY_VARIABLE] = ",".join(map(str, service.memory_fds()))
        pid = os.fork()
        if pid == 0:
            be_rank(folder, environ, job, args)
        pids[pid] = node_rank
    while pids:
        for service in services:
            service.handle()
        ended = {pid: os.waitpid(pid, os.WNOHANG)[1] for pid in list(pids) if process.has_ended(pid)}
        pids = {pid: node_rank for pid, node_rank in pids.items() if pid not in ended}
        for other in pids if any(ended.values()) else ():
            os.kill(other, signal.SIGKILL)
        if not ended:
            time.sleep(0.005)
    for service in services:
        assert service.finish(60)
    return [torch.load(path) for path in sorted(folder.glob("rank-*.pt"))]


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    numbers = iter(range(1, 100))

    def run(services: list[CheckpointService], job: Job, *args: Any) -> list[Any]:
        return generation(next(numbers), folder, services, job, *args)

    fresh = [CheckpointService() for _ in range(NODES)]
    found["undisturbed"] = run(fresh, memory_jobs.train_on, str(folder / "none"), 9)
    services = [CheckpointService() for _ in range(NODES)]
    run(services, memory_jobs.killed_in_the_copy, str(folder / "a"), 5)
    found["held"] = [[shared_buffer.newest_step([fd]) for fd in service.memory_fds()] for service in services]
    found["memory"] = run(services, memory_jobs.train_on, str(folder / "a"), 9)
    found["another root"] = run(services, memory_jobs.train_on, str(folder / "other"), 5)
    run(services, memory_jobs.killed_in_the_copy, str(folder / "a"), 5)
    found["node 0 is new"] = run(
        [CheckpointService(), services[1]], memory_jobs.train_on, str(folder / "a"), 9
    )
    run(fresh, memory_jobs.killed_after_the_copy, str(folder / "b"), 5)
    found["published"] = sorted(path.name for path in (folder / "b").glob("step-*"))
    found["both"] = run(fresh, memory_jobs.train_on, str(folder / "b"), 9)
    found["disk"] = run(
        [CheckpointService() for _ in range(NODES)], memory_jobs.train_on, str(folder / "b"), 9
    )
    return found


if __name__ == "__main__":
    torch.save(main(Path(sys.argv[1])), Path(sys.argv[1]) / "found.pt")
