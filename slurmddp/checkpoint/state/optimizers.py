"""Load the states of optimizers without changing any value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a saved `state_dict` into an optimizer without changing the dtype of scalar tensors.

    torch's load_state_dict converts the scalars of the state, except "step", to the dtype of the parameter.
    NAdam's scalar "mu_product" of a bfloat16 or float64 parameter would then be rounded differently, and a
    resumed training would differ.

    Args:
        optimizer: the optimizer that gets the state. If its class has its own `load_state_dict`, only this
            method is called.
        saved: a result of `state_dict` of such an optimizer.
    """
    optimizer.load_state_dict(dict(saved))
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return

    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for name, value in (saved["state"].get(number) or {}).items():
            if name != "step" and isinstance(value, torch.Tensor) and value.dim() == 0 and name in loaded:
                loaded[name] = value.to(loaded[name].device, copy=True)
