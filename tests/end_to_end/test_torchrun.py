"""Ranks of torchrun, which `slurmddp run --launcher torchrun` or a person starts, and which restarts them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slurmddp.environments.scrub import scrub
from support.runs.agent_runs import events, wait_until
from support.runs.train_runs import only_run, slurmddp

pytestmark = pytest.mark.distributed

# Rank 1 dies at step 5 of the first group. The first attempt then trains until it is stopped. A later one
# takes some steps in any case: rank 0 holds the store, and must not end before rank 1 has found the group.
SCRIPT = """
import math, os, signal, sys, time
import torch
import torch.distributed as dist

file, rank, first = f"{sys.argv[1]}/mine.pt", int(os.environ["RANK"]), os.environ["SLURMDDP_ATTEMPT"] == "0"
restart = int(os.environ["SLURMDDP_RESTART_COUNT"])
asked = []
signal.signal(signal.SIGUSR2, lambda number, frame: asked.append(number))
dist.init_process_group("gloo")
step = torch.load(file)["step"] if os.path.exists(file) else 0
ranks = dist.get_world_size()
print(f"rank {rank} of {ranks} begins at {step}, restart {restart}", *sys.argv[2:], flush=True)
last = math.inf if first else step + 5
while step < last:
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
print("done", step, flush=True)
"""


def test_t9_t11_ranks_under_torchrun_restart_stop_at_sigusr2_and_resume(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT)
    own = ['program.checkpoints="{run_dir}/mine.pt"', "program.resume_args=--again", "program.resumable=true"]
    words = ["run", "--launcher", "torchrun", "nodes=2", "-n", "1", "name=fit", *own, "fit.py", "{run_dir}"]
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
    wait_until(lambda: all(log.exists() and "begins at 5" in log.read_text() for log in logs), "a restart")
    slurmddp(tmp_path, "stop", run.name)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 75, output
    assert all("after SIGUSR2" in log.read_text() for log in logs)
    for log in logs:
        assert "torchrun: restart 1 (a node may cause at most 10)" in log.read_text()
        assert "begins at 5, restart 1 --again" in log.read_text()
    assert [(event["generation"], event["rank"]) for event in events(run, "restarted")] == [(1, 1)]
    shown = slurmddp(tmp_path, "status", run.name)
    slurmddp(tmp_path, "report", run.name)
    assert "was killed by SIGKILL" in (run.path / "report.html").read_text()
    assert re.search(r"restarted +\S+ \S+: rank 1 on \S+ was killed by SIGKILL", shown), shown
    slurmddp(tmp_path, *words)
    assert [event["outcome"] for event in events(run, "ended")] == ["stopped", "finished"]
    for rank in range(2):
        text = run.rank_log(1, rank).read_text()
        assert f"rank {rank} of 2 begins at " in text and "begins at 0" not in text
        assert "--again" in text


# With `die`, rank 1 dies in the first group. With `wait`, two ranks wait at step 20 for the loss of one.
ELASTIC = """
import os, signal, sys, time
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from slurmddp import Distributon

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with Distributon(seed=0) as d:
    d.launch()
    model = d.setup_model(torch.nn.Linear(1, 1))
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.ones(400, 1), torch.ones(400, 1))
    loader = d.setup_dataloader(DataLoader(data, batch_size=4, drop_last=True), keep_global_batch=True)
    step = d.load(model=model, optimizer=optimizer) or 0
    d.print(f"{d.world_size} ranks, {loader.accumulate} batches a step, from step {step}, restart {restart}")
    batches = iter(loader)
    while step < 40:
        for number in range(1, loader.accumulate + 1):
            inputs, targets = next(batches)
            last = number == loader.accumulate
            with d.accumulating(model, last=last):
                d.backward(mse_loss(model(inputs), targets), accumulate=loader.accumulate)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if sys.argv[1] == "die" and step == 5 and restart == 0 and d.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            d.save(step, model=model, optimizer=optimizer)
        while sys.argv[1] == "wait" and step == 20 and d.world_size == 2:
            time.sleep(0.1)
            d.barrier()
    d.print(f"done at step {step}")
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"]
STARTED = re.compile(r"(\d) ranks, (\d) batches a step, from step (\d+), restart (\d)")


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a torchrun whose output goes to the file `log`."""
    (folder / "fit.py").write_text(ELASTIC)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [*TORCHRUN, *words],
            cwd=folder,
            env={**scrub(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def lose(node: subprocess.Popen[str]) -> None:
    """Kill a torchrun and its ranks at once."""
    with suppress(psutil.NoSuchProcess):
        torchrun = psutil.Process(node.pid)
        for one in [torchrun, *torchrun.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    node.wait()


def test_t9_after_a_dead_rank_torchrun_starts_all_ranks_again_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    run = begin(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=2", "fit.py", "die")
    assert run.wait(timeout=200) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert STARTED.findall(text) == [("2", "1", "0", "0"), ("2", "1", "4", "1")]
    assert "done at step 40" in text


def test_t10_after_the_loss_of_a_node_torchrun_continues_with_fewer_ranks_and_equal_steps(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=fit"]
    conf = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"
    nodes = [
        begin(tmp_path, *words, endpoint, f"--rdzv-conf=is_host={is_host},{conf}", "fit.py", "wait")
        for is_host in (1, 0)
    ]
    latest = tmp_path / "checkpoints" / "latest"
    try:
        wait_until(lambda: latest.exists() and "step-0000000020" in latest.read_text(), "step 20")
        lose(nodes[1])
        assert nodes[0].wait(timeout=120) == 0, (tmp_path / "log").read_text()
    finally:
        for node in nodes:
            lose(node)
    text = (tmp_path / "log").read_text()
    assert [found[:3] for found in STARTED.findall(text)] == [("2", "1", "0"), ("1", "2", "20")]
    assert "done at step 40" in text
