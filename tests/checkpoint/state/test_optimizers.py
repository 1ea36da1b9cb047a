"""A loaded optimizer has the state that was saved, in values and in dtypes."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from slurmddp.checkpoint.state.optimizers import load_optimizer
from support.distributed.trainer_runs import assert_same

CLASSES = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_optimizer_of_torch_continues_from_its_saved_state(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    first, again = (nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(2))
    optimizer, loaded = (kind([parameter], lr=0.1) for parameter in (first, again))  # type: ignore[call-arg]
    for _ in range(3):
        first.grad = first.detach().clone()
        optimizer.step()

    saved = copy.deepcopy(optimizer.state_dict())
    load_optimizer(loaded, saved)
    for name, value in saved["state"].get(0, {}).items():
        assert getattr(loaded.state[again][name], "dtype", None) == getattr(value, "dtype", None), name
    assert_same(loaded.state_dict()["state"], saved["state"])
