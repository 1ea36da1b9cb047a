"""The real agent with torch: forked ranks meet over gloo, inherit what DDP needs, and save when stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from slurmddp.runs.failures import capture
from support.distributed import forked_agents
from support.runs.agent_runs import make_run, wait_for_lines, wait_until
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = pytest.mark.distributed

AGENT = """
import os, sys
from slurmddp.launchers.agent.agent import run
code = run(sys.argv[1], entry="rank_program:main")
sys.stdout.flush()
os._exit(code)
"""
STEP = """
import json, os, sys
import torch

from slurmddp.environments.detect import detect
from slurmddp.training.process_group import setup as bootstrap

kept = []


def step(model, optimizer):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    return loss


def prepare():
    place = bootstrap.start(detect(os.environ))
    torch.manual_seed(place.info.rank)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    # Taken apart right after a collective, the last user of a gloo group waits for a thread that waits for
    # the interpreter (torch 2.13); a rank ends without taking anything apart.
    kept.append(wrapped)
    return place, wrapped, torch.optim.AdamW(wrapped.parameters())
"""


def test_forked_ranks_take_a_ddp_step_without_importing_more(tmp_path: Path) -> None:
    program = STEP + (
        "def main(run_dir):\n"
        "    before = set(sys.modules)\n"
        "    place, model, optimizer = prepare()\n"
        "    step(model, optimizer)\n"
        "    more = sorted(set(sys.modules) - before)\n"
        "    print(json.dumps([model.module.weight.sum().item(), more]))\n"
        "    bootstrap.finish(place)\n"
        "    return 0\n"
    )
    folder = make_run(tmp_path, program)
    with agents_of(folder, 1, program=AGENT) as agents:
        assert codes_of(agents) == [0], logs(folder)
    found = [json.loads(folder.rank_log(0, rank).read_text().splitlines()[-1]) for rank in range(2)]
    assert len({weight for weight, _ in found}) == 1, "all ranks hold the same weights"
    assert all(more == [] for _, more in found), "the agent has imported it all before the fork"


@pytest.mark.usefixtures("rank_server")
def test_ranks_of_an_agent_that_cannot_be_forked_train_as_well(tmp_path: Path) -> None:
    program = STEP + (
        "def main(run_dir):\n"
        "    place, model, optimizer = prepare()\n"
        "    step(model, optimizer)\n"
        "    print(json.dumps(model.module.weight.sum().item()))\n"
        "    bootstrap.finish(place)\n"
        "    return 0\n"
    )
    folder = make_run(tmp_path, program)
    thread = "threading.Thread(target=threading.Event().wait, name='monitor', daemon=True)"
    (tmp_path / "project" / "monitored.py").write_text(f"import threading\n{thread}.start()\n")
    options = {"entry": "rank_program:main", "preload": ["monitored"]}
    with forked_agents.agents_of(folder, 1, **options) as agents:
        assert agents[0].wait() == 0, logs(folder)
    said = (folder.log_dir(0) / "node-0.log").read_text()
    assert "importing monitored has started a thread (monitor), so ranks are not forked" in said
    found = [folder.rank_log(0, rank).read_text().splitlines()[-1] for rank in range(2)]
    assert found[0] == found[1], "all ranks hold the same weights"


STEPS = (
    STEP
    + """
import signal

stop = []

def main(run_dir):
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: stop.append(number))
    place, model, optimizer = prepare()
    step(model, optimizer)
    print(f"ready as {os.getpid()}.", flush=True)
    while True:
        asked = torch.tensor([float(bool(stop))])
        torch.distributed.all_reduce(asked)
        if asked.item():
            break
        step(model, optimizer)
    bootstrap.finish(place)
    return 75
"""
)


@pytest.mark.usefixtures("rank_server")
def test_a_stop_on_one_node_lets_all_ranks_save(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STEPS, nodes=2)
    with forked_agents.agents_of(folder, 2, entry="rank_program:main") as agents:
        wait_for_lines(folder, "ready as", 4)
        agents[1].send_signal(signal.SIGTERM)
        assert [agent.wait() for agent in agents] == [75, 75], logs(folder)


@pytest.mark.usefixtures("rank_server")
def test_of_a_killed_rank_and_those_that_lost_it_the_killed_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, STEPS, nodes=2)
    # However slow the agent of the killed rank is, its report counts.
    options = {"entry": "rank_program:main", "cause_wait_s": 60.0}
    with forked_agents.agents_of(folder, 2, **options) as agents:
        wait_for_lines(folder, "ready as", 4)
        ranks = psutil.Process(agents[1].pid).children()
        assert len(ranks) >= 2
        victim = folder.rank_log(0, 2).read_text().partition("ready as ")[2].partition(".")[0]
        os.kill(int(victim), signal.SIGKILL)
        assert [agent.wait() for agent in agents] == [1, 1], logs(folder)
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.node_rank, found.signal) == (2, 1, "SIGKILL")
    wait_until(lambda: not any(rank.is_running() for rank in ranks), "all ranks end")
