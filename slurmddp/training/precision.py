"""Number formats of the forward pass: weights, gradients and optimizer states stay in float32.

Automatic mixed precision as in torch.amp: within the model's forward pass, torch runs each operation in the
format that suits the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slurmddp.errors import ConfigError, near_matches

PRECISIONS: Mapping[str, torch.dtype | None] = {"32": None, "bf16": torch.bfloat16}
"""The names of precisions, with the format that autocast prefers; None: no autocast."""


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the format that autocast prefers under a precision, or None without autocast.

    Raises:
        ConfigError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"There is no precision {precision!r}.",
            hint=near_matches(precision, PRECISIONS) or f"Use one of {', '.join(PRECISIONS)}.",
        )
    return PRECISIONS[precision]


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Run the forward passes of `model` under autocast; its results come back in float32.

    Args:
        model: the module to change. Copies of the module run under autocast too.
        device: the device of its inputs.
        dtype: the preferred format; None changes nothing.
    """
    if dtype is None:
        return
    entered: list[torch.autocast] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        context = torch.autocast(device.type, dtype=dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        entered.append(context)

    def leave(module: nn.Module, inputs: Any, results: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return pytree.tree_map(lambda one: _in_float32(one, dtype), results)

    # Hooks instead of another `forward`: a deep copy of the module keeps hooks, but its replaced `forward`
    # would still run the original's weights.
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _in_float32(value: Any, dtype: torch.dtype) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == dtype else value
