"""The average of the weights: its numbers, and who uses it."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from slurmddp.training.trainer.callbacks import Callbacks
from slurmddp.training.trainer.components import Components
from slurmddp.training.trainer.ema import AverageOfWeights


def test_the_average_decays_and_buffers_are_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))
    average, expected = AverageOfWeights(model, 0.75), model[0].weight.detach().clone()
    for step in range(3):
        with torch.no_grad():
            model[0].weight += step
            model[1].running_mean += 1  # type: ignore[operator]
        average.update()
        expected = 0.75 * expected + 0.25 * model[0].weight.detach()
    averaged = average.model.state_dict()
    torch.testing.assert_close(averaged["0.weight"], expected)
    assert torch.equal(averaged["1.running_mean"], torch.tensor([3.0]))
    assert list(averaged) == list(model.state_dict())


def test_evaluation_and_checkpoints_know_the_average() -> None:
    model, optimizer = nn.Linear(2, 1), object()
    average = AverageOfWeights(model, 0.9)
    for ema, evaluated, names in ((average, average.model, {"ema"}), (None, model, set[str]())):
        parts: Any = SimpleNamespace(
            model=model,
            bare_model=model,
            optimizer=optimizer,
            scheduler=None,
            ema=ema,
            callbacks=Callbacks({}),
        )
        assert Components.evaluated_model.fget(parts) is evaluated  # type: ignore[attr-defined]
        found = Components.saved_objects.fget(parts)  # type: ignore[attr-defined]
        assert found.keys() == {"model", "optimizer"} | names
    assert isinstance(average.model.state_dict(), OrderedDict)
