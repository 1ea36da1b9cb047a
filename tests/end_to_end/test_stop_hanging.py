"""A stop while data hangs: the ranks leave before SLURM kills them, and the next attempt repeats the step."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from slurmddp.runs.folder.layout import RunFolder
from support.distributed.trainer_runs import assert_same, curve, final_state, trainer_config
from support.runs.agent_runs import events, make_run, wait_until
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]
STEPS, ACCUMULATE, BATCH = 8, 2, 2
TRAINED = 5
"""Steps before the one that hangs."""
HANG_AT = TRAINED * ACCUMULATE * BATCH + BATCH + 1
"""The first sample of the second batch of the sixth step."""
KILL_WAIT_S = 10
AGENT = """
import os, sys
from slurmddp.launchers.agent import agent, event_loop
event_loop.WRITING_SHARE = -1000.0  # A crowded machine gets the time to write what memory holds.
os._exit(agent.run(sys.argv[1]))
"""


def make(path: Path, workers: int) -> RunFolder:
    config = trainer_config(
        data={"_target_": "support.distributed.faulty_jobs.Hanging", "size": 64},
        train={
            "steps": STEPS, "batch_size": BATCH, "accumulate": ACCUMULATE, "workers": workers, "log_every": 1,
            "eval_every": 0, "save_every": 0, "memory_save_every": 1,
        },
        model={"_target_": "support.distributed.faulty_jobs.Falling"},
    )  # fmt: skip
    return make_run(path, "", **config)


def train(folder: RunFolder, attempt: int = 0) -> None:
    with agents_of(folder, 1, attempt=attempt) as agents:
        assert codes_of(agents) == [0], logs(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make(tmp_path_factory.mktemp("undisturbed"), workers=0)
    train(folder)
    return folder


@pytest.mark.parametrize(
    ("workers", "ranks"), [(1, [0]), (0, [1]), (0, [0, 1])], ids=["worker", "one-rank", "all-ranks"]
)
def test_ranks_whose_data_hangs_leave_before_the_kill_and_only_repeat_the_step(
    tmp_path: Path, undisturbed: RunFolder, workers: int, ranks: list[int]
) -> None:
    folder = make(tmp_path, workers)
    hang = {"HANG_RANKS": ",".join(map(str, ranks)), "HANG_AT": str(HANG_AT)}
    limits = {"SLURMDDP_KILL_WAIT_S": str(KILL_WAIT_S)}
    with agents_of(folder, 1, program=AGENT, **hang, **limits) as agents:
        wait_until(lambda: all((folder.path / f"hangs-{rank}").exists() for rank in ranks), "the hang")
        wait_until(lambda: f'"step": {TRAINED},' in folder.metrics_file.read_text(), "the step before")
        began = time.monotonic()
        agents[0].send_signal(signal.SIGTERM)
        assert codes_of(agents) == [75], logs(folder)
        assert time.monotonic() - began < 100, "no rank waits for its data"
    assert "s after SIGTERM this rank has not left" in logs(folder)
    train(folder, attempt=1)
    assert [one["step"] for one in events(folder, "resumed")] == [TRAINED]
    assert curve(folder) == curve(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))
