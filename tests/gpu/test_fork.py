"""The agent imports all of torch and forks ranks that use the GPU; where it can't, it spawns them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.emit import emulated_step
from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import make_run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

AGENT = """
import os, sys
from slurmddp.launchers.agent.agent import run
from slurmddp.launchers.agent.preload import PRELOAD, why_no_fork
preload = (*PRELOAD, *sys.argv[2:])
code = run(sys.argv[1], entry="rank_program:main", preload=preload)
print("no fork:", why_no_fork())
sys.stdout.flush()
os._exit(code)
"""
PROGRAM = """
import os
import torch

def main(run_dir):
    product = torch.eye(64, device="cuda") @ torch.full((64, 64), 3.0, device="cuda")
    print("parent", os.getppid(), "sum", product.sum().item())
    return 0
"""
TOUCHES_CUDA = """
import torch

on_device = torch.zeros(1, device="cuda")
"""
TOUCHES_THE_DRIVER = """
import ctypes

ctypes.CDLL("libcuda.so.1").cuInit(0)
"""


def run_agent(tmp_path: Path, *preload: str) -> tuple[int, str, RunFolder]:
    """Run an agent with one rank; return its code, what it said, and its run."""
    folder = make_run(tmp_path, PROGRAM, ranks_per_node=1)
    (tmp_path / "project" / "touches_cuda.py").write_text(TOUCHES_CUDA)
    (tmp_path / "project" / "touches_the_driver.py").write_text(TOUCHES_THE_DRIVER)
    folder.log_dir(0).mkdir(parents=True)
    script = tmp_path / "start_agent.py"
    script.write_text(AGENT)
    environ = scrub(os.environ) | emulated_step(1, 0, "local-1", folder.path, 0)
    command = [sys.executable, str(script), str(folder.path), *preload]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, folder


def test_a_forked_rank_uses_the_gpu_and_the_agent_never_does(tmp_path: Path) -> None:
    code, said, folder = run_agent(tmp_path)
    assert code == 0, said + folder.rank_log(0, 0).read_text()
    assert "sum 12288.0" in folder.rank_log(0, 0).read_text()
    assert "no fork: None" in said


@pytest.mark.parametrize("module", ["touches_cuda", "touches_the_driver"])
def test_where_an_import_uses_cuda_ranks_are_programs_of_their_own(tmp_path: Path, module: str) -> None:
    code, said, folder = run_agent(tmp_path, module)
    assert code == 0, said + folder.rank_log(0, 0).read_text()
    assert "sum 12288.0" in folder.rank_log(0, 0).read_text()
    assert "has initialised CUDA" in said
