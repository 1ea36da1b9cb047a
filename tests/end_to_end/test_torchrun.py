"""`slurmddp run --torchrun`: torchrun starts the ranks; logs, restarts and stops are as for other runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub
from support.runs.agent_runs import events, wait_until
from support.runs.train_runs import only_run, slurmddp

pytestmark = pytest.mark.distributed

# Rank 1 dies at step 5 of the first group. The first attempt then trains until it is stopped.
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

file, rank, first = f"{sys.argv[1]}/mine.pt", int(os.environ["RANK"]), os.environ["SLURMDDP_ATTEMPT"] == "0"
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
asked = []
signal.signal(signal.SIGUSR2, lambda number, frame: asked.append(number))
dist.init_process_group("gloo")
step = torch.load(file)["step"] if os.path.exists(file) else 0
print(f"rank {rank} of {dist.get_world_size()} begins at {step}, restart {restart}", flush=True)
while first or step < 20:
    if first and restart == 0 and rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    stop = torch.tensor([len(asked)])
    dist.all_reduce(stop)
    step += 1
    if rank == 0:
        torch.save({"step": step}, f"{file}.new")
        os.replace(f"{file}.new", file)
    if stop.item():
        dist.barrier()
        print(f"rank {rank} saved step {step} after SIGUSR2", flush=True)
        sys.exit(75)
    time.sleep(0.02)
dist.destroy_process_group()
print("done", step, *sys.argv[2:], flush=True)
"""


def test_t9_t11_ranks_under_torchrun_restart_stop_at_sigusr2_and_resume(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT)
    own = ['program.checkpoints="{run_dir}/mine.pt"', "program.resume_args=--again", "program.resumable=true"]
    words = ["run", "--torchrun", "nodes=2", "-n", "1", "name=fit", *own, "fit.py", "{run_dir}"]
    first = subprocess.Popen(
        [sys.executable, "-m", "slurmddp", *words],
        cwd=tmp_path,
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: first.poll() is not None or [*tmp_path.glob("runs/*/logs/*")], "a run folder")
    run = only_run(tmp_path)
    logs = [run.rank_log(0, rank) for rank in range(2)]
    wait_until(lambda: all(log.exists() and "restart 1" in log.read_text() for log in logs), "a restart")
    wait_until(lambda: "begins at 5, restart 1" in logs[1].read_text(), "the resumed ranks")
    slurmddp(tmp_path, "stop", run.name)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 75, output
    assert all("after SIGUSR2" in log.read_text() for log in logs)
    assert all("torchrun: restart 1 of at most 10" in log.read_text() for log in logs)
    slurmddp(tmp_path, *words)
    assert [event["outcome"] for event in events(run, "ended")] == ["stopped", "finished"]
    for rank in range(2):
        text = run.rank_log(1, rank).read_text()
        assert f"rank {rank} of 2 begins at " in text and "begins at 0" not in text
        assert "--again" in text
