"""The guard against spikes: its limit, its skips and rollbacks, and their number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from slurmddp.errors import SlurmddpError
from slurmddp.runs.report.goodput import measure
from slurmddp.training.trainer.spike_guard import MAX_REACTIONS, PERIOD, SpikeGuard, spike_limit
from support.distributed import trainer_jobs
from support.distributed.exact_cases import Case, config_of
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import final_state, new_folder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.mark.parametrize(
    ("losses", "limit"),
    [
        ([], math.inf),
        ([1.0] * 15, math.inf),
        ([2.0] * 16, 2 + 8 * 0.2),
        ([-2.0] * 16, -2 + 8 * 0.2),
        ([1.0, 3.0] * 16, 2 + 8 * 1.4826),
        ([1.0] * 15 + [1000.0], 1 + 8 * 0.1),
    ],
)
def test_the_limit_follows_median_and_deviation(losses: list[float], limit: float) -> None:
    assert spike_limit(losses) == pytest.approx(limit)


def test_a_spike_is_told_and_does_not_enter_the_window() -> None:
    guard = SpikeGuard("rollback", nn.Linear(1, 1))
    assert [guard.problem(step, 1.0, 1.0) for step in range(1, 21)] == [""] * 20
    assert guard.problem(21, 1.79, 1.0) == ""
    assert "The loss of step 22 is 5, a spike above 1.8" in guard.problem(22, 5.0, 1.0)
    assert guard.problem(22, 1.0, math.inf) == "The gradient norm of step 22 is inf."
    guard.reaction_steps = [22]
    guard.rollback_step = 20
    guard.left_out = 2
    again = SpikeGuard("rollback", nn.Linear(1, 1))
    again.load_state_dict(guard.state_dict())
    assert list(again.recent) == [1.0] * 20 + [1.79]
    assert (again.spoilt_checkpoint(22), again.spoilt_checkpoint(23), again.left_out) == (20, None, 2)


@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_a_finite_spike_counts_for_rollback_only(mode: str) -> None:
    guard = SpikeGuard(mode, nn.Linear(1, 1))  # type: ignore[arg-type]
    assert [guard.problem(step, 1.0 if step < 30 else 99.0, 1.0) for step in range(1, 31)] == [""] * 30
    assert guard.problem(31, math.nan, 1.0) == "The loss of step 31 is nan."


def test_the_number_of_skips_within_a_period_is_limited() -> None:
    guard, problem = SpikeGuard("skip", nn.Linear(1, 1)), SlurmddpError("The loss of step 1 is nan.")
    assert guard.record(1, problem) == f"skip 1 of at most {MAX_REACTIONS} within {PERIOD} steps"
    for step in range(PERIOD + 1, PERIOD + MAX_REACTIONS + 1):
        guard.record(step, problem)
    with pytest.raises(SlurmddpError, match="This would be skip 11 within 1000 steps"):
        guard.record(PERIOD + MAX_REACTIONS + 1, problem)


def test_a_loss_that_is_not_finite_shows_in_the_gradient_norm() -> None:
    """A clamped loss may be infinite although its gradient is finite."""
    guard, weight = SpikeGuard("skip", nn.Linear(1, 1)), torch.tensor([0.3, 0.7], requires_grad=True)
    guard.marked((weight**3).sum() + math.inf).backward()
    assert weight.grad is not None and weight.grad.isnan().all()
    plain, marked = (torch.tensor([0.3, 0.7], requires_grad=True) for _ in range(2))
    loss = (plain**3).sum()
    loss.backward()
    kept = guard.marked((marked**3).sum())
    kept.backward()
    assert torch.equal(kept, loss)
    assert plain.grad is not None and marked.grad is not None and torch.equal(plain.grad, marked.grad)


def test_a_skipped_step_leaves_the_buffers_as_they_were() -> None:
    model = nn.BatchNorm1d(2)
    guard = SpikeGuard("skip", model)
    guard.begin_step()
    model(torch.full((4, 2), math.nan))
    assert not guard.skips(torch.tensor(1.0)) and model.running_mean.isnan().all()  # type: ignore[union-attr]
    assert guard.skips(torch.tensor(math.nan))
    assert torch.equal(model.running_mean, torch.zeros(2)) and model.num_batches_tracked == 0


def test_rollbacks_leave_out_the_data_that_led_to_them(tmp_path: Path) -> None:
    """The bad sample is in the steps 5, 10, 14 and 17 of the data; checkpoints are at 3, 6 and 9."""
    case = Case("", 2, "", accumulate=2, train=(("on_spike", "rollback"), ("save_every", 3)), bad_sample=17)
    folder = new_folder(tmp_path / "run")
    assert run_ranks(trainer_jobs.train_once, 2, config_of(case), str(folder.path), None) == ["finished"] * 2
    told = [event["text"] for event in folder.events() if event["event"] == "warned"]
    assert told == [
        f"The loss of step {step} is nan. Training is back at step {back} and leaves out the data of {steps} "
        f"steps (rollback {number} of at most 10 within 1000 steps)."
        for number, (step, back, steps) in enumerate([(5, 3, 2), (8, 6, 2), (10, 9, 1), (12, 9, 4)], 1)
    ]
    guard = final_state(folder)["objects"]["progress"]["guard"]
    assert (guard["left_out"], guard["at"], len(guard["recent"])) == (8, [5, 8, 10, 12], 12)
    times = [event["time"] for event in folder.events()]
    parts = measure(folder.events(), now=times[-1], running=True).parts
    assert "starting" not in parts, "the first event is the first step; the time after a rollback is no start"


def test_a_rollback_leaves_a_checkpoint_that_leads_to_a_spike_again_for_an_older_one(tmp_path: Path) -> None:
    """The optimizer's state is NaN in checkpoint 6, so that each training from there has a NaN loss at 8."""
    case = Case("", 1, "", train=(("on_spike", "rollback"), ("save_every", 3)))
    config = config_of(case)
    config["callbacks"] = {"spoil": {"_target_": "support.distributed.trainer_jobs.Spoil", "step": 6}}
    folder = new_folder(tmp_path / "run")
    assert run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None) == ["finished"]
    told = [event["text"] for event in folder.events() if event["event"] == "warned"]
    assert told == [
        f"The loss of step 8 is nan. Training is back at step {back} and leaves out the data of {steps} "
        f"steps (rollback {number} of at most 10 within 1000 steps)."
        for number, (back, steps) in enumerate([(6, 2), (3, 7)], 1)
    ]
    assert (folder.checkpoints_dir / "abandoned-step-0000000006").is_dir()


def test_a_rollback_without_a_checkpoint_ends_the_attempt(tmp_path: Path) -> None:
    case = Case("", 2, "", train=(("on_spike", "rollback"),), bad_sample=17)
    folder = new_folder(tmp_path / "run")
    for error in run_ranks(trainer_jobs.error_of_training, 2, config_of(case), str(folder.path)):
        assert "The loss of step 5 is nan. There is no checkpoint to go back to." in error
