"""The end of a training by `train.max_time`: after the same step on all ranks, over all attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.folder.jsonl import read_lines
from support.distributed import trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import assert_same, curve, final_state, new_folder, trainer_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def test_a_training_ends_when_its_time_over_all_attempts_is_over(tmp_path: Path) -> None:
    """A step takes 10 s by the clock of rank 0, 20 s by the clock of rank 1. A stop comes after 2 steps."""
    train = {"steps": 9, "batch_size": 2, "log_every": 1, "eval_every": 0, "save_every": 4}
    config = trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 40},
        train={**train, "max_time": "45s"},
        model={"_target_": "support.distributed.exact_jobs.Noisy"},
        callbacks={"clock": {"_target_": "support.distributed.trainer_jobs.TenSecondSteps"}},
    )
    folder, whole = new_folder(tmp_path / "run"), new_folder(tmp_path / "whole")
    ended = run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), 2)
    assert all(end.startswith("Stopped at step 2 of 9") for end in ended)
    for _ in range(2):  # The second start finds a training that is complete.
        assert run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), None) == ["finished"] * 2
    lines = [(line["step"], "loss" in line) for line in read_lines(folder.metrics_file)]
    assert lines == [(0, False), (1, True), (2, True), (3, True), (4, True), (5, True), (5, False)]
    said = "train.max_time=45s is over: the training ends after step 5 of 9."
    assert [one["text"] for one in folder.events() if one["event"] == "warned"] == [said, said]
    state = final_state(folder)
    assert state["objects"]["progress"].pop("trained_s") == 50.0
    run_ranks(trainer_jobs.train_once, 2, {**config, "train": {**train, "steps": 5}}, str(whole.path), None)
    assert_same(state, final_state(whole))
    assert curve(folder) == curve(whole)
