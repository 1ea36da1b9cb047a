"""The shapes of a batch: how the model is called with them, which targets they hold, and refused ones."""

from __future__ import annotations

import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
from slurmddp.training.trainer import components
from slurmddp.training.trainer.batch import forward, loss_of_batch, loss_of_output


class Called(nn.Module):
    """Returns the arguments of the call."""

    def forward(self, x: Any, mask: Any = None, labels: Any = None) -> Any:
        return x, mask, labels


class Wrapper(nn.Module):
    """Takes any arguments, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("batch", "called_with", "targets"),
    [
        ((1, 9), (1, None, None), 9),
        ([1, 9], (1, None, None), 9),
        (((1, 2), 9), (1, 2, None), 9),
        (([1, 2], 9), (1, 2, None), 9),
        (((1,), 9), (1, None, None), 9),
        ((Point(1, 2), 9), (Point(1, 2), None, None), 9),
        (({"mask": 2, "x": 1}, {"y": 9}), (1, 2, None), {"y": 9}),
        ({"x": 1, "labels": 9}, (1, None, 9), {"x": 1, "labels": 9}),
        (OrderedDict(x=1, mask=2), (1, 2, None), {"x": 1, "mask": 2}),
    ],
)
def test_the_model_is_called_with_the_inputs_of_the_batch(
    batch: Any, called_with: tuple[Any, ...], targets: Any
) -> None:
    model = Called()
    assert forward(Wrapper(model), batch, model) == (called_with, targets)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.zeros(3), "batches of type Tensor; the trainer needs pairs (inputs, targets), or dicts"),
        ((1, 2, 3), "batches of 3 parts; the trainer needs pairs"),
        ([1], "batches of 1 parts"),
        ({"x": 1, "y": 9}, "2 inputs named x, y, but Called.forward(x"),
        (((1, 2, 3, 4), 9), "it was given 4 inputs, but Called.forward(x"),
        (({"mask": 2}, 9), "missing a required argument: 'x'"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Any, said: str) -> None:
    model = Called()
    with pytest.raises(ConfigError) as caught:
        forward(Wrapper(model), batch, model)
    assert said in str(caught.value) and caught.value.hint


class Faulty(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + None


def test_a_loss_of_several_numbers_is_refused_with_its_name_and_shape() -> None:
    assert loss_of_batch(torch.ones(1, 1), "mine.loss").shape == ()
    with pytest.raises(ConfigError) as refused:
        loss_of_batch(torch.ones(16, 10), "my_nets.badloss")
    assert (
        "my_nets.badloss returned a tensor of shape (16, 10), but it must be a scalar"
        in refused.value.message
    )
    assert ".mean()" in refused.value.hint
    checked = components._checked_loss({"_target_": "torch.nn.MSELoss", "reduction": "none"})
    with pytest.raises(ConfigError, match=r"torch.nn.MSELoss returned a tensor of shape \(4, 2\)"):
        checked(torch.ones(4, 2), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("value", "returned"),
    [
        (None, "a NoneType"),
        (1.5, "a float"),
        ((torch.ones(()),), "a tuple"),
        ((1.5, 2), "a pair whose first part is of type float"),
        ((torch.ones(2), 2), "a pair whose first part is float32 (2,)"),
    ],
)
def test_a_result_that_is_no_loss_is_refused_with_the_name_of_its_function(value: Any, returned: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"my_nets.badloss returned {returned}, but")) as refused:
        loss_of_batch(value, "my_nets.badloss")
    assert "or a pair (sum, count)" in refused.value.hint
    assert loss_of_batch((torch.ones(1), 2), "mine.loss") == (1, 2)


def test_an_error_within_the_model_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        forward(Faulty(), (1, 2))


@pytest.mark.parametrize(
    "outputs",
    [
        SimpleNamespace(loss=torch.tensor(2.5)),
        {"loss": torch.tensor([2.5])},
        OrderedDict(loss=torch.tensor(2.5)),
    ],
)
def test_the_loss_of_the_output_is_a_scalar(outputs: Any) -> None:
    found = loss_of_output(outputs, None)
    assert found.shape == () and float(found) == 2.5


@pytest.mark.parametrize(
    "outputs", [torch.zeros(3), {"logits": 1}, SimpleNamespace(loss=None), {"loss": torch.zeros(2)}]
)
def test_an_output_without_a_loss_is_refused(outputs: Any) -> None:
    with pytest.raises(ConfigError, match="`loss` is null, but the model's output is of type"):
        loss_of_output(outputs, None)
