"""A rank that hangs is named with all stacks, and the ranks restart or the attempt ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import events, make_run
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]

AGENT = """
import os, sys
from slurmddp.launchers.agent.agent import run
from slurmddp.launchers.agent import node_watch
for name in ("LINE_EVERY_S", "_POLL_S"):
    assert hasattr(node_watch, name), "to set what nobody reads would change nothing"
    setattr(node_watch, name, 0.2)
code = run(sys.argv[1], entry="rank_program:main")
sys.stdout.flush()
os._exit(code)
"""
PROGRAM = """
import os, time
from pathlib import Path
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset
from slurmddp import Distributon

HANGS = os.environ["RANK"] == "1" and os.environ["SLURMDDP_RESTART_COUNT"] == "0"
HOW = {how!r}
BEGUN = time.monotonic()


def hang():
    while HANGS:
        time.sleep(0.01)


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if HOW == "data" and index >= 8:
            hang()
        if HOW == "collective" and os.environ["RANK"] == "1":
            time.sleep(0.05)
        return torch.ones(2)


class Model(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if HOW == "forward" and self.calls == 3:
            hang()
        return super().forward(x)


def slow_rank_is_told(d, run_dir):
    # On a busy machine the other rank may be told first.
    told = "slowest: rank 1 " in Path(run_dir, "attempts.jsonl").read_text()
    told = told or time.monotonic() > BEGUN + 120
    return d.all_reduce(torch.tensor([float(told)])).item() > 0


def main(run_dir):
    with Distributon(seed=0) as d:
        d.launch()
        model = d.setup_model(Model(2, 1))
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = d.setup_dataloader(DataLoader(Numbers(), batch_size=2, num_workers=HOW == "data"))
        on = True
        while on:
            on = HOW == "collective"
            for batch in loader:
                if HOW == "collective" and slow_rank_is_told(d, run_dir) and HANGS:
                    d.barrier()
                d.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    return 0
"""


def run_agents(tmp_path: Path, how: str, nodes: int, **policy: Any) -> tuple[RunFolder, list[int]]:
    sizes = {"nodes": nodes, "ranks_per_node": 2 // nodes}
    folder = make_run(tmp_path, PROGRAM.format(how=how), **sizes, policy={"stall_timeout_s": 4, **policy})
    folder.attempts_file.touch()
    with agents_of(folder, nodes, program=AGENT) as agents:
        return folder, codes_of(agents)


@pytest.mark.parametrize(
    ("how", "nodes", "phase", "place"),
    [("forward", 2, "step", "it is at rank_program.py"), ("data", 1, "data", "its loader worker is")],
)
def test_a_rank_that_hangs_is_named_and_the_ranks_begin_again(
    tmp_path: Path, how: str, nodes: int, phase: str, place: str
) -> None:
    folder, codes = run_agents(tmp_path, how, nodes)
    assert codes == [0] * nodes, logs(folder)
    (stalled,) = events(folder, "stalled")
    assert (stalled["rank"], stalled["phase"], stalled["restart_count"]) == (1, phase, 0), logs(folder)
    assert stalled["seconds"] >= 4
    (fallen,) = events(folder, "rank_failed")
    assert fallen["rank"] == 1
    assert fallen["reason"].startswith("stalled: ")
    assert place in fallen["reason"]
    assert "rank 0 waits at rank_program.py" in fallen["reason"]
    (restarted,) = events(folder, "restarted")
    assert restarted["restart_count"] == 1
    assert restarted["silent_s"] >= 4
    for rank in (0, 1):
        stacks = (folder.log_dir(0) / f"stacks-rank-{rank}.txt").read_text()
        assert "rank_program.py" in stacks
        assert ("in hang" in stacks) is (rank == 1)


def test_a_slow_rank_is_told_and_a_stall_after_which_nothing_begins_again_is_the_failure(
    tmp_path: Path,
) -> None:
    folder, codes = run_agents(tmp_path, "collective", 1, max_restarts_in_place=0)
    assert codes == [1]
    found = capture.read(folder, 0)
    assert found is not None
    assert found.rank == 1
    assert found.reason.startswith(
        "stalled: in a collective that not all ranks have joined, at rank_program.py"
    )
    assert any("in barrier" in line for line in found.last_lines)
    assert not events(folder, "restarted")
    slow = [event["text"] for event in events(folder, "straggler") if event["rank"] == 1]
    assert slow, logs(folder)
    assert slow[-1].startswith(f"slowest: rank 1 on {found.host}, ")
    assert slow[-1] in (folder.log_dir(0) / "node-0.log").read_text()
