"""The default program on iterable data, with and without a saved position, and on weighted data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.runs.status.metrics import latest, read
from slurmddp.training.trainer import dataset
from support.distributed import data_jobs, trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import assert_same, curve, final_state, new_folder, trainer_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def make_config(data: str, *, arguments: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    settings = {"steps": 12, "batch_size": 2, "accumulate": 2, "log_every": 1, "save_every": 0}
    return trainer_config(
        data={"_target_": f"support.distributed.data_jobs.{data}", **(arguments or {})},
        train={**settings, **train},
    )


@pytest.mark.parametrize(
    ("data", "ranks", "workers"),
    [("Placed", 2, 2), ("Placed", 2, 0), ("Shared", 2, 2), ("Unshared", 1, 0), ("Weighted", 2, 0)],
)
def test_a_stopped_run_ends_where_an_undisturbed_one_does(
    tmp_path: Path, data: str, ranks: int, workers: int
) -> None:
    """Two ranks come to the end of 43 samples in the sixth step, each at another place."""
    arguments = {"count": 43} if data != "Weighted" else {}
    config = make_config(data, arguments=arguments, workers=workers)
    whole, parts = new_folder(tmp_path / "whole"), new_folder(tmp_path / "parts")
    run_ranks(trainer_jobs.train_once, ranks, config, str(whole.path), None)
    for stop in (3, 7, None):
        ended = run_ranks(trainer_jobs.train_once, ranks, config, str(parts.path), stop)
        assert all(("Stopped at" in end) == (stop is not None) for end in ended), ended
    assert_same(final_state(whole), final_state(parts))
    assert curve(whole) == curve(parts)
    assert final_state(whole)["loaders"][0]["epoch"] >= 1 or data == "Weighted"


def test_batches_that_are_dicts_train_the_same_model_as_pairs(tmp_path: Path) -> None:
    """The model takes the dict by name and returns its loss; a stop comes before the evaluation of step 4."""
    jobs = "support.distributed.data_jobs"
    named = make_config("Named", eval_every=4, workers=1) | {
        "model": {"_target_": f"{jobs}.Judge"},
        "loss": None,
        "metrics": {"accuracy": {"_target_": f"{jobs}.accuracy_of_judge"}},
    }
    paired = make_config("Paired", eval_every=4) | {
        "metrics": {"accuracy": {"_target_": "slurmddp.training.trainer.accuracy"}}
    }
    whole, parts = new_folder(tmp_path / "whole"), new_folder(tmp_path / "parts")
    run_ranks(trainer_jobs.train_once, 2, paired, str(whole.path), None)
    for stop in (4, None):
        run_ranks(trainer_jobs.train_once, 2, named, str(parts.path), stop)
    assert_same(final_state(whole), final_state(parts))
    pairs, dicts = read(whole), read(parts)
    assert dicts.train.values == pairs.train.values
    assert dicts.held_out == pairs.held_out and dicts.held_out.steps == (0, 4, 8, 12)
    assert dicts.own == pairs.own and dicts.own["accuracy"].steps == (0, 4, 8, 12)
    newest = latest(parts)
    assert newest.own == {"accuracy": dicts.own["accuracy"].values[-1]} and newest.held_out is not None


def error_of(tmp_path: Path, config: dict[str, Any], ranks: int) -> str:
    folder = new_folder(tmp_path / "run")
    return str(run_ranks(trainer_jobs.error_of_training, ranks, config, str(folder.path))[0])


@pytest.mark.parametrize(
    ("data", "arguments", "train", "said"),
    [
        (
            "Unshared",
            {},
            {"workers": 2},
            "data is a Unshared, which is iterable and can't be divided among 2 readers",
        ),
        ("Unshared", {"count": 1}, {}, "data is a Unshared whose epoch has no whole batch for this rank"),
        ("HeldoutStream", {}, {}, "heldout() gives a Unshared, which has no length or can't be indexed"),
        ("WeightedStream", {}, {}, "is a WeightedStream, which is iterable and has sample_weights"),
        ("Weighted", {"weights": [1.0, 2.0]}, {}, "sample_weights has the shape (2,) for 100 samples"),
    ],
)
def test_unusable_data_is_refused(
    tmp_path: Path, data: str, arguments: dict[str, Any], train: dict[str, Any], said: str
) -> None:
    error = error_of(tmp_path, make_config(data, arguments=arguments, **train), 1)
    assert error.startswith("ConfigError") and said in error


def test_readers_that_do_not_share_are_refused_on_several_ranks(tmp_path: Path) -> None:
    assert "can't be divided among 2 readers" in error_of(tmp_path, make_config("Unshared"), 2)


def test_the_state_of_another_number_of_loader_workers_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 1, make_config("Placed", workers=0), str(folder.path), 3)
    before = final_state(folder)
    changed = make_config("Placed", workers=1)
    (error,) = run_ranks(trainer_jobs.error_of_training, 1, changed, str(folder.path))
    assert "0 loader worker(s) per rank read the iterable Placed" in error and "train.workers=0" in error
    assert_same(before, final_state(folder))


@pytest.mark.parametrize(
    "weights", [[-1.0] + [1.0] * 99, [float("nan")] * 100, [0.0] * 100, "heavy", ["a"] * 100]
)
def test_impossible_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="Weighted whose sample_weights"):
        dataset.sampler_for(data_jobs.Weighted(weights))


def test_weights_may_be_a_tensor() -> None:
    drawn = dataset.sampler_for(data_jobs.Weighted(torch.ones(100, dtype=torch.int32)))
    assert isinstance(drawn, torch.utils.data.WeightedRandomSampler) and drawn.num_samples == 100


def test_data_without_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a single sample"):
        dataset.checked([], readers=1)
