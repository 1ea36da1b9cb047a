"""The average of the weights: its numbers, and who uses it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
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
        )
        assert Components.evaluated_model.fget(parts) is evaluated  # type: ignore[attr-defined]
        found = Components.saved_objects.fget(parts)  # type: ignore[attr-defined]
        assert found.keys() == {"model", "optimizer"} | names
    assert isinstance(average.model.state_dict(), OrderedDict)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_average_of_a_model_with_computed_weights() -> None:
    """The old weight_norm keeps the weight that it has computed last beside its two parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    model(torch.ones(1, 3))
    average = AverageOfWeights(model, 0.75)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    average.update()

    expected = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    with torch.no_grad():
        for mean, before, after in zip(expected.parameters(), first, model.parameters(), strict=True):
            mean.copy_(0.75 * before + 0.25 * after)
    torch.testing.assert_close(average.model(torch.ones(1, 3)), expected(torch.ones(1, 3)))
    assert not torch.equal(first[1], list(model.parameters())[1]), "the model still trains"


def test_a_model_that_can_not_be_copied_is_refused_by_the_setting() -> None:
    model = nn.Linear(2, 1)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"train\.ema=0\.9 needs a copy.*Linear can't be copied: .*lock"):
        AverageOfWeights(model, 0.9)
