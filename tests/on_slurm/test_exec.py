"""`slurmddp exec` in an allocation of a real SLURM: the ranks run on its nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurmddp.sandbox import Sandbox

pytestmark = pytest.mark.slurm


def run(sandbox: Sandbox, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["salloc", "--quiet", "--nodes=2", sys.executable, "-m", "slurmddp", "exec", *words]
    return subprocess.run(command, env=sandbox.environment(), capture_output=True, text=True)


def test_the_ranks_share_the_nodes_of_the_allocation(sandbox: Sandbox) -> None:
    done = run(
        sandbox,
        "-n",
        "4",
        "sh",
        "-c",
        "echo $RANK $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $SLURM_PROCID $(hostname)",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in sorted(done.stdout.splitlines())]
    assert [line[:4] + line[5:6] for line in lines] == [
        ["[rank", f"{rank}]", str(rank), str(rank % 2), str(rank)] for rank in range(4)
    ]
    hosts = [line[6] for line in lines]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert len({line[4] for line in lines}) == 1


def test_the_first_failure_ends_the_ranks_of_all_nodes(sandbox: Sandbox) -> None:
    done = run(sandbox, "-n", "4", "sh", "-c", "[ $RANK = 2 ] || exec sleep 600; sleep 1; exit 7")
    assert done.returncode == 7, done.stderr
    assert "Rank 2 on " in done.stderr
