"""Callbacks of the trainer: when they are called, how they resume, and objects that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.errors import ConfigError
from slurmddp.training.trainer.callbacks import Callbacks
from support.distributed import trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import final_state, new_folder, trainer_config


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_all_ranks_call_them_in_order_and_a_resume_keeps_their_state(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    config = trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 40},
        train={"steps": 5, "batch_size": 2, "eval_every": 2, "save_every": 2, "log_every": 1},
        model={"_target_": "support.distributed.exact_jobs.Noisy"},
        callbacks={"recorder": {"_target_": "support.distributed.trainer_jobs.Recorder", "path": str(notes)}},
    )
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), 3)
    assert final_state(folder)["objects"]["callbacks"] == {"recorder": {"calls": 8}}
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), None)
    first = ["start 0", "evaluation 0 eval_loss", "step 1", "step 2", "save 2", "evaluation 2 eval_loss"]
    resumed = ["start 3", "step 4", "save 4", "evaluation 4 eval_loss", "step 5", "evaluation 5 eval_loss"]
    calls = [*first, "step 3", "save 3", *resumed, "save 5", "end 5"]
    for rank in range(2):
        lines = Path(f"{notes}-{rank}").read_text().splitlines()
        assert lines == [f"{number} {call}" for number, call in enumerate(calls, 1)]


class Silent:
    pass


class Misspelled:
    def on_step_end(self, training: Any) -> None: ...

    def on_evaluation_ends(self, training: Any, metrics: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "said", "hint"),
    [
        (Silent(), "callbacks.one gives a Silent, which has no method of a callback", "on_train_start"),
        (
            Misspelled(),
            "with a method on_evaluation_ends, which would never",
            "Did you mean on_evaluation_end",
        ),
        ({"layer": 3}, "callbacks.one gives a dict, which has no method of a callback", "on_step_end"),
    ],
)
def test_an_object_that_would_never_be_called_is_refused(callback: Any, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Callbacks({"one": callback})
    assert said in caught.value.message and hint in caught.value.hint


def test_a_callback_without_a_state_is_no_part_of_a_checkpoint() -> None:
    class Plain:
        def on_save(self, training: Any) -> None: ...

    assert not Callbacks({"plain": Plain()}).has_state
