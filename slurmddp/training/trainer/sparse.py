"""Refuse optimizers that can't train the sparse gradients of an embedding, before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slurmddp.errors import ConfigError


def check_sparse(model: nn.Module, optimizer: Optimizer) -> None:
    """Check whether an optimizer can train embeddings with `sparse=True`, by a step on a small example.

    Args:
        model: if it has no such embedding, nothing is checked.
        optimizer: the optimizer to check. It takes no step; a new one of its class and settings does.

    Raises:
        ConfigError: the optimizer refuses sparse gradients, or keeps a sparse state, which no checkpoint
            stores.
    """
    sparse_parameters = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    if not sparse_parameters:
        return

    for group in optimizer.param_groups:
        if not any(id(parameter) in sparse_parameters for parameter in group["params"]):
            continue
        problem = _problem(optimizer, group)
        if problem:
            raise ConfigError(
                f"{type(optimizer).__name__} can't train the sparse gradients of an embedding of "
                f"{type(model).__name__}: {problem}.",
                hint="Choose torch.optim.SGD with momentum=0, torch.optim.Adagrad or "
                "torch.optim.SparseAdam, without weight decay, or build the embedding with sparse=False.",
            )


def _problem(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Return why an optimizer with the settings of `group` can't use sparse gradients; "" if it can."""
    parameter = nn.Parameter(torch.zeros(2, 1))
    row = torch.zeros(1, dtype=torch.long)
    nn.functional.embedding(row, parameter, sparse=True).sum().backward()  # type: ignore[no-untyped-call]

    optimizer_class: Any = type(optimizer)
    try:
        twin = optimizer_class([{**group, "params": [parameter]}])
    except (TypeError, ValueError):
        # The constructor needs arguments that a parameter group does not hold, so the class can't be tested.
        return ""

    try:
        twin.step()
    except RuntimeError as error:
        return str(error)

    if any(isinstance(value, torch.Tensor) and value.is_sparse for value in twin.state[parameter].values()):
        return "it keeps a sparse state, such as a momentum, which no checkpoint can store"
    return ""
