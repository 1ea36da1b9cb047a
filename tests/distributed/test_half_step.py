"""A stop that comes during the start, or in the middle of a step, wastes nothing and changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import half_jobs
import pytest
import trainer_runs
from ranks import run_ranks
from trainer_runs import assert_same, final_state, trainer_config

from slurmddp.runs.folder import RunFolder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def make_run(
    path: Path, ranks: int, data: str = "Augmented", model: str = "Normed", **train: Any
) -> RunFolder:
    config = trainer_config(
        data={"_target_": f"half_jobs.{data}"},
        model={"_target_": f"half_jobs.{model}"},
        train={"steps": 4, "log_every": 1, "eval_every": 0, "save_every": 0, **train},
    )
    return trainer_runs.make_run(path, ranks, config)


def work(folder: RunFolder, ranks: int, ask_at: int = 0) -> list[int]:
    return run_ranks(half_jobs.work, ranks, str(folder.path), ask_at)


def saved_steps(folder: RunFolder) -> list[int]:
    return [event["step"] for event in folder.events() if event["event"] == "saved"]


@pytest.mark.parametrize(
    ("ranks", "accumulate", "workers"),
    [(1, 64, 0), (2, 64, 0), (2, 64, 1), (2, 1, 0)],
    ids=["alone", "several batches", "loader workers", "one large batch"],
)
def test_a_stop_within_a_step_leaves_nothing_of_it(
    tmp_path: Path, ranks: int, accumulate: int, workers: int
) -> None:
    """The rest of the third step would take 23 seconds; an undisturbed run has the very same weights."""
    train = {"accumulate": accumulate, "batch_size": 128 // accumulate, "workers": workers}
    whole, parts = (make_run(tmp_path / name, ranks, **train) for name in ("whole", "parts"))
    assert work(whole, ranks) == [0] * ranks
    assert work(parts, ranks, ask_at=2 * 128 + 10) == [75] * ranks
    assert saved_steps(parts) == [2]
    assert int((parts.path / "read").read_text()) < 3 * 128, "the samples of the step were not all read"
    assert work(parts, ranks) == [0] * ranks
    assert_same(final_state(whole), final_state(parts))


def test_an_attempt_takes_its_first_step_whole(tmp_path: Path) -> None:
    """Else a job that is always stopped within its first step would get nowhere."""
    run = make_run(tmp_path / "run", 1, accumulate=8, batch_size=2)
    assert work(run, 1, ask_at=3) == [75]
    assert saved_steps(run) == [1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["StopFile", "EarlyOnOne"])
def test_a_stop_during_the_start_comes_before_any_evaluation_and_step(
    tmp_path: Path, model: str, ranks: int
) -> None:
    run = make_run(tmp_path / "run", ranks, "WithHeldout", model)
    assert work(run, ranks) == [75] * ranks
    (signalled,) = run.events()
    assert signalled["signal"] == (f"the file {run.stop_file}" if model == "StopFile" else "SIGTERM")
    assert not run.metrics_file.exists() and not any(run.checkpoints_dir.iterdir())
