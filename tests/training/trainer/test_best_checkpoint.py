"""`train.best`: the best evaluation is saved, its checkpoint stays, and list, status and export name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.checkpoint.files.best_by_metric import step_and_value
from slurmddp.checkpoint.files.list_checkpoints import best_of_run, best_whole, list_checkpoints
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.training.trainer.best_checkpoint import BestCheckpoint
from support.distributed import trainer_jobs
from support.distributed.checkpoint_files import flip_bit
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import make_run, trainer_config


def config_of(**changes: Any) -> dict[str, Any]:
    """Return a training whose metric `score` has a given value at each evaluation."""
    jobs = "support.distributed.trainer_jobs"
    train = {"steps": 10, "batch_size": 2, "log_every": 1, "eval_every": 2, "save_every": 3, "keep_last": 2}
    return trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 40},
        train={**train, "best": "max score"},
        model={"_target_": "support.distributed.exact_jobs.Noisy"},
        metrics={"score": {"_target_": f"{jobs}.Score", "values": [9, 3, 5, 4, 5, 1]}},
        callbacks={"steps": {"_target_": f"{jobs}.ScoreStep"}},
        **changes,
    )


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_the_best_checkpoint_is_saved_kept_and_named(tmp_path: Path) -> None:
    """Evaluations at even steps; a stop after step 5. Step 8 is as good as step 4, and is not saved."""
    config = config_of()
    folder = make_run(tmp_path / "run", 2, config)
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), 5)
    assert run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), None) == ["finished"] * 2
    root = folder.checkpoints_dir
    assert [event["step"] for event in folder.events() if event["event"] == "saved"] == [2, 3, 4, 5, 6, 9, 10]
    assert [(row.step, row.best, row.latest) for row in list_checkpoints(root)] == [
        (10, False, True),
        (9, False, False),
        (4, True, False),
    ]
    assert best_step(folder) == BestStep(4, "score", 5.0)
    assert list_checkpoints(root)[2].metrics.keys() == {"eval_loss", "score"}
    by = best_of_run(root)
    assert by == ("score", "max") and step_and_value(root, by) == (4, 5.0)
    assert best_whole(root, by) == root / "step-0000000004"
    flip_bit(root / "step-0000000004" / "state.safetensors", 100)
    assert best_whole(root, by) == root / "step-0000000010", "the other one with this metric"


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_a_best_metric_needs_evaluations(tmp_path: Path) -> None:
    config = config_of() | {"data": {"_target_": "builtins.list", "_args_": [[1, 2, 3, 4]]}}
    folder = make_run(tmp_path / "run", 1, config)
    error = run_ranks(trainer_jobs.error_of_training, 1, config, str(folder.path))[0]
    assert "train.best=max score needs evaluations, and there is no held-out data" in error


@pytest.mark.parametrize(
    ("text", "values", "better"),
    [
        ("eval_loss", [3.0, 2.0, 2.0, float("nan"), 1.0], [True, True, False, False, True]),
        ("min mae", [3.0, 4.0], [True, False]),
        ("max f1", [float("-inf"), 0.5, 0.4, 0.6], [False, True, False, True]),
        (None, [1.0, 0.5], [False, False]),
    ],
)
def test_an_evaluation_is_the_best_if_it_is_better_than_all_before(
    text: str | None, values: list[float], better: list[bool]
) -> None:
    name = "eval_loss" if text is None else text.split()[-1]
    best = BestCheckpoint(text)
    assert [best.improves({name: value}) for value in values] == better
