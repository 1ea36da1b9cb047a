"""States with NaN or infinity are neither saved nor copied; a checkpoint with them is quarantined once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import POINTER_FILE
from slurmddp.runs.folder.layout import RunFolder
from support.distributed import spoilt_jobs, trainer_jobs
from support.distributed.checkpoint_files import steps_in
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import assert_same, final_state, new_folder, trainer_config
from support.runs.agent_runs import make_run, wait_until
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]
STEPS = 8


def config_of(train: dict[str, Any], at: int = -1, marker: str = "", **changes: Any) -> dict[str, Any]:
    settings = {"steps": STEPS, "batch_size": 2, "log_every": 100, "eval_every": 0, "eval_batches": 0}
    return trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 21, "heldout": 10},
        train={**settings, "save_every": 2, **train},
        model={"_target_": "support.distributed.spoilt_jobs.Overflowing", "at": at, "marker": marker},
        **changes,
    )


def assert_finite(folder: RunFolder) -> None:
    for step in steps_in(folder.checkpoints_dir):
        state = checkpoint.read(folder.checkpoints_dir / f"step-{step:010d}").state["objects"]
        for name, value in state["model"].items():
            assert value.isfinite().all(), (step, name)


def warnings_of(folder: RunFolder) -> list[str]:
    return [event["text"] for event in folder.events() if event["event"] == "warned"]


@pytest.mark.parametrize(
    ("at", "save_every", "clip_norm", "kept"), [(5, 5, 1.0, []), (5, 5, None, []), (6, 4, 1.0, [4])]
)
def test_a_step_with_an_infinite_gradient_is_named_and_never_saved(
    tmp_path: Path, at: int, save_every: int, clip_norm: float | None, kept: list[int]
) -> None:
    folder = new_folder(tmp_path / "run")
    config = config_of({"save_every": save_every, "clip_norm": clip_norm}, at)
    for error in run_ranks(trainer_jobs.error_of_training, 2, config, str(folder.path)):
        assert f"The gradient norm of step {at} is inf" in error
        assert ("step-0000000004 was saved before it" in error) == bool(kept)
        assert ("SLURMDDP_ALLOW_OTHER_CONFIG=1" in error) == bool(kept)
    wait_until(lambda: steps_in(folder.checkpoints_dir) == kept, "what is written beside the training")
    assert_finite(folder)


def train_with_agent(path: Path, config: dict[str, Any]) -> tuple[RunFolder, list[int]]:
    folder = make_run(path, "", **config)
    with agents_of(folder, 1) as agents:
        return folder, codes_of(agents)


def test_a_state_that_is_not_finite_never_reaches_the_disk_by_a_copy(tmp_path: Path) -> None:
    config = config_of({"save_every": 4, "memory_save_every": 1}, 6, policy={"max_restarts_in_place": 0})
    folder, codes = train_with_agent(tmp_path, config)
    assert codes == [1], logs(folder)
    assert steps_in(folder.checkpoints_dir)[-1] == 4
    assert max(steps_in(folder.checkpoints_dir)) in (4, 5), "5 is what memory holds, if it was ready by then"
    assert_finite(folder)
    assert "gradient norm of step 6" in json.loads(folder.failure_file(0).read_text())["reason"]


def test_ranks_restart_in_place_after_one_overflow(tmp_path: Path) -> None:
    train = {"save_every": 4, "memory_save_every": 1}
    folder, codes = train_with_agent(tmp_path, config_of(train, 6, str(tmp_path / "spent")))
    assert codes == [0], logs(folder)
    whole = new_folder(tmp_path / "whole")
    run_ranks(trainer_jobs.train_once, 2, config_of(train), str(whole.path), None)
    assert_same(final_state(folder)["objects"], final_state(whole)["objects"])


def spoil(folder: RunFolder, step: int) -> None:
    """Write NaN into the checkpoint of `step`, as an earlier version could."""
    path = folder.checkpoints_dir / f"step-{step:010d}"
    found = checkpoint.read(path)
    found.state["objects"]["model"]["last.weight"][0, 0] = torch.nan
    checkpoint.write(folder.checkpoints_dir, step, found.state, meta=found.meta, keep_last=9)


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 2, config_of({"keep_last": 9}), str(folder.path), 6)
    assert steps_in(folder.checkpoints_dir) == [6, 4, 2]
    return folder


def test_a_spoilt_checkpoint_is_quarantined_and_training_resumes_from_the_one_before(
    tmp_path: Path, stopped: RunFolder
) -> None:
    spoil(stopped, 6)
    config = config_of({"keep_last": 9})
    assert run_ranks(trainer_jobs.train_once, 2, config, str(stopped.path), None) == ["finished"] * 2
    assert (stopped.checkpoints_dir / "bad-step-0000000006").is_dir()
    assert steps_in(stopped.checkpoints_dir) == [8, 6, 4, 2]
    assert [event["step"] for event in stopped.events() if event["event"] == "resumed"] == [6, 4]
    (told,) = warnings_of(stopped)
    assert "step-0000000006" in told and "bad-step-0000000006" in told and "goes back to step 4" in told
    whole = new_folder(tmp_path / "whole")
    run_ranks(trainer_jobs.train_once, 2, config, str(whole.path), None)
    assert_same(final_state(stopped), final_state(whole))


@pytest.mark.parametrize("spoilt", [[6, 4], [6]], ids=["the one before, too", "the step itself, each time"])
def test_at_most_one_checkpoint_is_quarantined(tmp_path: Path, stopped: RunFolder, spoilt: list[int]) -> None:
    for step in spoilt:
        spoil(stopped, step)
    config = config_of({"keep_last": 9}, 7 if spoilt == [6] else -1)
    at = 6 if spoilt == [6] else 4
    for _ in range(2):
        for error in run_ranks(trainer_jobs.error_of_training, 2, config, str(stopped.path)):
            assert "is nan" in error or "is inf" in error
        wait_until(lambda: steps_in(stopped.checkpoints_dir)[0] == at, "what is written meanwhile")
    aside = [path.name for path in stopped.checkpoints_dir.glob("bad-*")]
    assert aside == ["bad-step-0000000006"]
    newest = stopped.checkpoints_dir / (stopped.checkpoints_dir / POINTER_FILE).read_text().strip()
    assert newest.is_dir()


def test_the_only_checkpoint_is_not_quarantined(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 2, config_of({}), str(folder.path), 2)
    spoil(folder, 2)
    for error in run_ranks(trainer_jobs.error_of_training, 2, config_of({}), str(folder.path)):
        assert "The loss of step 3 is nan" in error
        assert "step-0000000002" in error
    assert steps_in(folder.checkpoints_dir) == [2]


def test_an_own_loop_can_not_save_weights_that_are_not_finite(tmp_path: Path) -> None:
    for said in run_ranks(spoilt_jobs.refused_saves, 2, str(tmp_path)):
        assert said.keys() == {"save", "no wait", "memory", "test"}
        assert all("'hidden.1.weight' of model" in text for text in said.values()), said
    assert steps_in(tmp_path) == [1]


def test_masks_frozen_weights_and_large_ones_are_saved(tmp_path: Path) -> None:
    assert run_ranks(spoilt_jobs.saves_what_may_be_infinite, 2, str(tmp_path)) == [1, 1]
