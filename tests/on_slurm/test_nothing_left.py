"""Agents in a step of a real SLURM: the first failure keeps its name, and a killed agent leaves nothing.

The ranks run a small program without torch. SLURM here tracks processes by their tree (proctrack/linuxproc):
what has lost its parent is out of its sight until the epilog of the job, which these steps do not wait for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from slurmddp.environments.scrub import scrub
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.read import rank_exits, read_failure
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.sandbox import Sandbox
from support.runs.agent_runs import all_gone, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PROGRAM = """
import os, pathlib, subprocess, time
rank, run = int(os.environ["RANK"]), pathlib.Path(os.environ["SLURMDDP_RUN_DIR"])
def main(run_dir):
    worker = subprocess.Popen(["sleep", "600"])
    (run / f"pids-{rank}.new").write_text(f"{os.getpid()} {worker.pid} {os.getppid()}")
    os.rename(run / f"pids-{rank}.new", run / f"pids-{rank}")
    while True:
        time.sleep(0.02)
        if rank == 3 and (run / "fail").exists():
            raise ValueError("bad sample 5")
"""
AGENT = """
import os, sys
from slurmddp.launchers.agent.agent import run
os._exit(run(sys.argv[1], entry="rank_program:main", preload=()))
"""


class Step:
    """A step of two agents with two ranks each; `pids` are, by rank, the rank, its worker, its agent."""

    def __init__(self, folder: RunFolder, srun: subprocess.Popen[bytes]) -> None:
        self.folder, self.srun = folder, srun
        files = [folder.path / f"pids-{rank}" for rank in range(4)]
        wait_until(lambda: all(file.exists() for file in files), "the ranks of both nodes")
        self.pids = [[int(word) for word in file.read_text().split()] for file in files]
        self.all = [psutil.Process(pid) for pid in sorted({pid for pids in self.pids for pid in pids})]
        self.all += [child for rank in (0, 2) for child in psutil.Process(self.pids[rank][2]).children()]


@contextmanager
def step(sandbox: Sandbox, tmp_path: Path) -> Iterator[Step]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "rank_program.py").write_text(PROGRAM)
    (project / "start_agent.py").write_text(AGENT)
    folder = RunFolder(tmp_path / "runs/left-00000000")
    folder.log_dir(0).mkdir(parents=True)
    config = {"nodes": 2, "ranks_per_node": 2, "project_dir": str(project)}
    folder.config_file.write_text(yaml.safe_dump(config))
    own = {"SLURMDDP_RUN_DIR": str(folder.path), "SLURMDDP_ATTEMPT": "0", "SLURMDDP_SECRET": "ab" * 16}
    environ = {**scrub(os.environ), **sandbox.environment(), **own}
    held = subprocess.run(
        ["salloc", "--no-shell", "-N2"], env=environ, capture_output=True, text=True, check=True
    )
    job = held.stderr.partition("Granted job allocation ")[2].split()[0]
    words = [
        "srun",
        f"--jobid={job}",
        "-N2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--mpi=none",
    ]
    words += [f"--output={folder.log_dir(0)}/node-%n.log", sys.executable, str(project / "start_agent.py")]
    with subprocess.Popen([*words, str(folder.path)], env=environ, stderr=subprocess.DEVNULL) as srun:
        yield Step(folder, srun)


def test_the_first_failure_keeps_its_name_though_srun_tells_another_code(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with step(sandbox, tmp_path) as run:
        (run.folder.path / "fail").touch()
        assert run.srun.wait(120) != 0
    found = read_failure(run.folder, 0)
    assert found is not None
    assert (found.rank, found.node_rank, found.exit_code) == (3, 1, 1)
    assert found.reason == "ValueError: bad sample 5 (rank_program.py:11 in main)"
    assert "[" not in capture.describe(found) and found.host in capture.describe(found)
    ends = rank_exits(run.folder, 0)
    assert [end.rank for end in ends] == [0, 1, 2, 3], "also those that were ended because of it"
    assert [(end.rank, end.exit_code) for end in ends if end.exit_code == 1] == [(3, 1)]
    assert {(run.folder.log_dir(0) / f"exit-node-{node}").read_text() for node in (0, 1)} == {"1\n"}
    wait_until(lambda: all_gone(run.all), "nothing is left of either node")


def test_a_killed_agent_leaves_nothing_on_either_node(sandbox: Sandbox, tmp_path: Path) -> None:
    with step(sandbox, tmp_path) as run:
        os.kill(run.pids[2][2], 9)
        assert run.srun.wait(120) != 0
        wait_until(lambda: all_gone(run.all), "nothing is left of either node")
    assert not (run.folder.log_dir(0) / "exit-node-1").exists(), (
        "by which the batch script knows that it is lost"
    )
    assert (run.folder.log_dir(0) / "exit-node-0").exists()
