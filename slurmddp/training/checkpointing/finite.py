"""Checks that gradients and saved parameters are finite: training can't continue from NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from slurmddp.checkpoint.state.shards import local, whole
from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.errors import SlurmddpError

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Types of which torch computes norms; the 8-bit types are not among them."""


def gradient_norm(model: nn.Module, clip_norm: float | None) -> torch.Tensor:
    """Clip the gradients of `model` to `clip_norm` unless that is None; return their norm before, a scalar.

    The result stays on the device of the gradients: nothing waits for it.
    """
    if clip_norm is not None:
        return whole(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return whole(get_total_norm([one._values() if one.is_sparse else one for one in gradients]))


def require_finite(step: int, objects: Mapping[str, Any], unwrap: Callable[[nn.Module], nn.Module]) -> None:
    """Raise SlurmddpError if a trainable parameter of a module in `objects` holds NaN or infinity.

    Buffers and frozen parameters are not checked, because masks often hold -inf. Of a sharded parameter, this
    rank checks its own shard.
    """
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            bad = _first_bad(unwrap(value))
            if bad is not None:
                raise SlurmddpError(
                    f"Parameter {bad!r} of {name} holds NaN or infinity at step {step}: nothing is saved.",
                    hint="Resume from the newest checkpoint with a lower learning rate or clipped gradients. "
                    f"If that changes the configuration, set {ALLOW_OTHER_CONFIG_VARIABLE}=1.",
                )


def _first_bad(model: nn.Module) -> str | None:
    named = [
        (name, local(p.detach())) for name, p in model.named_parameters() if p.requires_grad and _has_norm(p)
    ]
    # The norm of all parameters is one fast pass. Each parameter is read again only if it is not finite.
    if torch.isfinite(get_total_norm([parameter for _, parameter in named])):
        return None
    return next((name for name, parameter in named if not torch.isfinite(parameter).all()), None)


def _has_norm(parameter: nn.Parameter) -> bool:
    return parameter.dtype in _DTYPES and parameter.layout == torch.strided and not is_lazy(parameter)
