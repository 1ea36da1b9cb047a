"""Every way to stop a run, through a whole worker: file, signal, deadline, and what comes at the wrong time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stop_jobs
from ranks import run_ranks

from slurmddp.runs.folder import RunFolder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


def make_run(path: Path, ranks: int = 2, **train: Any) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    config = {
        "seed": 0,
        "nodes": 1,
        "ranks_per_node": ranks,
        "train": {"steps": 100_000, "batch_size": 2, "log_every": 1000, "eval_every": 0, "save_every": 0}
        | train,
        "data": {"_target_": "stop_jobs.Countdown"},
        "model": {"_target_": "rank_jobs.Net"},
        "loss": {"_target_": "slurmddp.training.trainer.token_cross_entropy", "_partial_": True},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "strategy": {"name": "ddp"},
        "program": {"_target_": "slurmddp.training.trainer.train"},
    }
    folder.config_file.write_text(json.dumps(config))
    return folder


def work(
    folder: RunFolder, act: str, at: int = 20, rank: int = 0, ranks: int = 2, **environ: str
) -> list[int]:
    return run_ranks(stop_jobs.work, ranks, str(folder.path), act, at, rank, environ)


def events(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in folder.events() if event["event"] == kind]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_stop_file_stops_all_at_a_checkpoint(tmp_path: Path, ranks: int) -> None:
    run = make_run(tmp_path / "run", ranks)
    assert work(run, "write_stop_file", ranks=ranks) == [75] * ranks
    (saved,), (signalled,) = events(run, "saved"), events(run, "signalled")
    assert saved["step"] >= 10
    assert signalled["signal"] == f"the file {run.stop_file}"
