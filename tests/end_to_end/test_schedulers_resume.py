"""Every scheduler of torch resumes from a checkpoint as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from slurmddp.training.distributon import Distributon

STEPS = 12

TORCHS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS + 1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 9), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}


def drive(scheduler: Any, steps: range) -> list[tuple[float, float]]:
    """Return rate and momentum after each step, the loss of which is its number modulo 3."""
    seen = []
    for step in steps:
        scheduler.optimizer.step()
        scheduler.step(*[float(step % 3)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        (group,) = scheduler.optimizer.param_groups
        seen.append((group["lr"], group["momentum"]))
    return seen


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("name", TORCHS)
def test_a_scheduler_of_torch_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def start() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return {"scheduler": TORCHS[name](optimizer), "optimizer": optimizer}

    whole = drive(start()["scheduler"], range(STEPS))
    assert len(set(whole)) > 1
    with Distributon(1) as d:
        d.launch()
        for stop in (1, 6):
            before, after = start(), start()
            rates = drive(before["scheduler"], range(stop))
            d.save(stop, root=tmp_path / str(stop), **before)
            assert d.load(root=tmp_path / str(stop), **after) == stop
            assert rates + drive(after["scheduler"], range(stop, STEPS)) == whole
