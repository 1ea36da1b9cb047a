"""Learning rates: the warm-up of the shipped schedules."""

from __future__ import annotations

import pytest
import torch

from slurmddp.training.builtin.schedules import cosine


def test_the_shipped_warm_up_fits_a_training_of_any_length() -> None:
    for steps in (1, 6, 19, 400):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        assert cosine(optimizer, steps=steps, warmup_steps=None).get_last_lr()[0] == (
            1.0 if steps < 20 else pytest.approx(1 / (steps // 20 + 1))
        )
