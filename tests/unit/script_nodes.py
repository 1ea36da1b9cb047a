"""The batch script of a job that may lose nodes, and nodes that answer or do not."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_run import Run

NODE = (
    "NodeName={} Arch=x86_64 State={} Partitions=low SlurmdStartTime=2020-01-01T00:00:00 LastBusyTime=None\n"
)
PUT_BACK = ["requeue 41", "update JobId=41 ExcNodeList=n1"]
"""Requests of `hostless` to SLURM for a job that has lost its first node."""


@pytest.fixture(params=["spare_nodes", "elastic"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return of_three(Run(tmp_path, **{"spare_nodes": 1, "nodes": 2} if request.param == "spare_nodes" else
                        {"elastic": True, "nodes": 3}))  # fmt: skip


def of_three(run: Run, *states: str) -> Run:
    run.environ["SLURM_JOB_NODELIST"] = "n[1-3]"
    nodes = zip(("n1", "n2", "n3"), states or ["ALLOCATED"] * 3, strict=True)
    run.programs.write("nodes", "".join(NODE.format(*node) for node in nodes))
    return run


@pytest.fixture
def slurmd() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield listening


def first_is_lost(run: Run, state: str = "DOWN*", port: int = 0) -> Run:
    """Let the first node have no slurmd, as an agent on the second would find it."""
    line = NODE.format("n1", state).replace(
        " State", f" NodeAddr=127.0.0.1 NodeHostName=n1 Port={port} State"
    )
    run.programs.write("node-n1", line)
    run.folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    return run


def ask_hostless(run: Run) -> list[str]:
    """Let an agent ask, and return what was asked of SLURM then."""
    run.programs.write("jobs/41", "RUNNING|||")
    environ = {**run.environ, "SLURMDDP_ATTEMPT": "0"}
    command = ["bash", str(run.folder.script_file), "hostless"]
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
    return [*run.asked(), *(["scancel"] if "CANCELLED" in run.programs.read("jobs/41") else [])]


@pytest.fixture
def refusing(slurmd: socket.socket) -> int:
    """A port where nobody listens."""
    return int(slurmd.getsockname()[1])
