"""Check that gradients and saved parameters are finite: training can't continue from NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def gradient_norm(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> torch.Tensor:
    """Return the total 2-norm of all gradients; with `clip_norm`, scale them in place to at most this norm.

    Args:
        parameters: parameters without a gradient are ignored. Gradients may be sparse.
        clip_norm: a number above 0; None: the gradients are not changed.

    Returns:
        The norm before clipping, a scalar on the device of the gradients. The call does not wait for a GPU.
    """
    owners = [_with_dense_gradient(parameter) for parameter in parameters if parameter.grad is not None]
    if clip_norm is not None:
        return whole(nn.utils.clip_grad_norm_(owners, clip_norm))
    return whole(get_total_norm([owner.grad for owner in owners if owner.grad is not None]))


def _with_dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return `parameter`; for a sparse gradient, a tensor whose dense gradient shares its values.

    torch's norm functions take dense gradients only.
    """
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter

    # The sparse gradient of an embedding has one entry per use of a row. `coalesce` adds up the entries of
    # the same row, whose sum is the gradient.
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad._values()
    owner = torch.empty_like(values)
    owner.grad = values
    return owner


def require_finite(step: int, objects: Mapping[str, Any], unwrap: Callable[[nn.Module], nn.Module]) -> None:
    """Raise SlurmddpError if a trainable parameter of a module in `objects` holds NaN or infinity.

    Buffers and frozen parameters are not checked: they may rightly hold infinity, as masks do. Of a sharded
    parameter, this rank checks its own shard.
    """
    for name, value in objects.items():
        if not isinstance(value, nn.Module):
            continue
        parameter = _first_not_finite(unwrap(value))
        if parameter is not None:
            raise SlurmddpError(
                f"Parameter {parameter!r} of {name} holds NaN or infinity at step {step}: nothing is saved.",
                hint="Resume from the newest checkpoint with a lower learning rate or clipped gradients. "
                f"If that changes the configuration, set {ALLOW_OTHER_CONFIG_VARIABLE}=1.",
            )


def _first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first trainable parameter that holds NaN or infinity; None if all are finite."""
    named = [
        (name, local(p.detach())) for name, p in model.named_parameters() if p.requires_grad and _has_norm(p)
    ]
    # Compute one norm over all parameters first, which is fast. Only if it is not finite, look for the
    # parameter.
    if torch.isfinite(get_total_norm([parameter for _, parameter in named])):
        return None
    return next((name for name, parameter in named if not torch.isfinite(parameter).all()), None)


def _has_norm(parameter: nn.Parameter) -> bool:
    return parameter.dtype in _DTYPES and parameter.layout == torch.strided and not is_lazy(parameter)
