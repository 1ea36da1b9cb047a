"""A resumed run takes the learning rate and the weight decay that its configuration has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from slurmddp.training.builtin.schedules import cosine
from slurmddp.training.trainer.changed_rates import apply_changes, configured_rates
from support.distributed import trainer_jobs
from support.distributed.exact_cases import Case, config_of
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import curve, final_state, new_folder

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: cosine(optimizer, steps=12, warmup_steps=4),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [5]
    ),
}


def made(schedule: str, lr: float) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": part * lr} for part in (1, 2)]
    optimizer = torch.optim.SGD(groups, weight_decay=lr)
    return optimizer, SCHEDULES[schedule](optimizer)


def rates_of_steps(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append(
            [value for group in optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
        )
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lr", [0.4, 0.1])
def test_the_steps_after_a_load_have_the_rates_of_a_training_that_began_with_them(
    schedule: str, lr: float
) -> None:
    old, new, whole = made(schedule, 0.1), made(schedule, lr), made(schedule, lr)
    before, now = configured_rates(old[0]), configured_rates(new[0])
    rates_of_steps(*old, 3)

    for loaded, saved in zip(new, old, strict=True):
        if loaded is not None:
            loaded.load_state_dict(saved.state_dict())
    apply_changes(before, now, *new)
    expected = rates_of_steps(*whole, 10)[3:]
    for rates, others in zip(rates_of_steps(*new, 7), expected, strict=True):
        assert rates == pytest.approx(others)


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_a_resumed_training_takes_the_changed_learning_rate(tmp_path: Path) -> None:
    config, folder = config_of(Case("", 1, "")), new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), 5)
    lower = {**config, "optimizer": {**config["optimizer"], "lr": config["optimizer"]["lr"] / 4}}
    run_ranks(trainer_jobs.train_once, 1, lower, str(folder.path), None)

    other = new_folder(tmp_path / "other")
    run_ranks(trainer_jobs.train_once, 1, config, str(other.path), None)
    before, rates = curve(other), curve(folder)
    for step in range(1, 13):
        share = 4 if step > 5 else 1
        assert rates[step, "loss"][1] == pytest.approx(before[step, "loss"][1] / share)
    assert final_state(folder)["objects"]["progress"]["rates"][0]["lr"] == lower["optimizer"]["lr"]
