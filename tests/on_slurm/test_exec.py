"""`slurmddp exec` in an allocation of a real SLURM: the ranks run on its nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_first_failure_ends_the_ranks_of_all_nodes(sandbox: Sandbox, tmp_path: Path) -> None:
    # A node that still starts Python when srun ends it would end with 143, the larger code.
    program = f"""
        cd {tmp_path}
        [ $RANK = 2 ] || {{ : >$RANK; exec sleep 600; }}
        until [ -e 0 ] && [ -e 1 ] && [ -e 3 ]; do sleep 0.1; done
        exit 7
    """
    done = run(sandbox, "-n", "4", "sh", "-c", program)
    assert done.returncode == 7, done.stderr
    assert "Rank 2 on " in done.stderr
