"""Ranks of torchrun, which `slurmddp run` starts as any command, or a person without slurmddp."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import events, wait_until
from support.runs.train_runs import only_run, slurmddp

pytestmark = pytest.mark.distributed

# With `die`, rank 1 dies in the first group. With `wait`, two ranks wait at step 20 for the loss of one. With
# `stop`, the first attempt waits at step 30 for a request to stop.
ELASTIC = """
import os, signal, sys, time
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from slurmddp import Distributon

restart = int(os.environ.get("SLURMDDP_RESTART_COUNT", 0)) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
is_first = os.environ.get("SLURMDDP_ATTEMPT", "0") == "0"
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
        if "die" in sys.argv and step == 5 and restart == 0 and d.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            d.save(step, model=model, optimizer=optimizer)
        while "wait" in sys.argv and is_first and step == 20 and d.world_size == 2:
            time.sleep(0.1)
            d.barrier()
        while "stop" in sys.argv and is_first and step == 30 and not d.should_stop():
            time.sleep(0.1)
        if d.should_stop():
            d.save(step, model=model, optimizer=optimizer)
            d.stop()
    d.print(f"done at step {step}")
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"]
AGENT = "slurmddp.launchers.agent"
PROGRAM = str(Path(sys.executable).with_name("torchrun"))
MEET = f"""exec {PROGRAM} --nnodes=$WORLD_SIZE --nproc-per-node=1 --monitor-interval=0.1 \\
--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT \\
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 "$@"
"""
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


def run_of(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `slurmddp run` with one torchrun on each node."""
    (folder / "fit.py").write_text(ELASTIC)
    return subprocess.Popen(
        [sys.executable, "-m", "slurmddp", "run", "-n", "1", "name=fit", *words],
        cwd=folder,
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_t9_after_a_dead_rank_torchrun_starts_all_ranks_again_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
    started = run_of(tmp_path, "--", PROGRAM, *words, "fit.py", "die")
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 0, output
    run = only_run(tmp_path)
    text = run.rank_log(0, 0).read_text()
    assert STARTED.findall(text) == [("2", "1", "0", "0"), ("2", "1", "4", "1")]
    assert "done at step 40" in text
    assert [event["outcome"] for event in events(run, "ended")] == ["finished"], "slurmddp restarted nothing"


def test_t9_t10_t11_torchruns_of_two_nodes_restart_lose_a_node_and_stop_at_sigusr2(
    tmp_path: Path,
) -> None:
    """slurmddp restarts the torchruns, which restart nothing; on one node they take two batches a step."""
    own = ["nodes=2", "elastic=true", "program.resumable=true"]
    words = [*own, "--", "sh", "-c", MEET, "torchrun", "fit.py", "die", "wait", "stop"]
    first = run_of(tmp_path, *words)
    wait_until(lambda: first.poll() is not None or [*tmp_path.glob("runs/*/logs/*/*")], "a run folder")
    run = only_run(tmp_path)
    wait_for_step(run, 20, first)
    agents = [child for child in psutil.Process(first.pid).children() if AGENT in child.cmdline()]
    first_agent, second_agent = sorted(agents, key=lambda agent: agent.environ()["SLURM_NODEID"])
    second_agent.kill()
    wait_for_step(run, 30, first)
    first_agent.send_signal(signal.SIGUSR2)  # as SLURM does before the time limit
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 75, output
    text = run.rank_log(0, 0).read_text() + run.rank_log(0, 1).read_text()
    assert sorted(STARTED.findall(text), key=lambda found: found[3]) == [
        ("2", "1", "0", "0"),
        ("2", "1", "4", "1"),
        ("1", "2", "20", "2"),
    ]
    assert "closing signal SIGUSR2" in text
    assert [event["signal"] for event in events(run, "signalled")] == ["SIGUSR2"]
    restarts = events(run, "restarted")
    assert [event["restart_count"] for event in restarts] == [1, 2]
    assert "was killed by SIGKILL" in restarts[0]["reason"], "of the rank, not of its torchrun"
    shown = slurmddp(tmp_path, "status", run.name)
    assert re.search(
        r"rank \d on \S+ was killed by SIGKILL.*in rank 1 of its torchrun\n.*node 1 \(\S+\) was lost", shown
    ), shown


def wait_for_step(run: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the checkpoint of a step is the newest."""
    latest = run.path / "checkpoints" / "latest"
    name = f"step-{step:010d}"
    wait_until(
        lambda: process.poll() is not None or (latest.exists() and name in latest.read_text()), f"step {step}"
    )


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
