"""Train in mixed precision with loss scaling; weights, gradients and optimizer states stay in float32.

Automatic mixed precision as in torch.amp: within the model's forward pass, torch runs each operation in the
number format that suits the operation.

Loss scaling as in Micikevicius et al., "Mixed Precision Training" (2018): small gradients would vanish in
float16, so the loss is multiplied by a scale, and the gradients are divided by it before each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches

PRECISIONS: Mapping[str, torch.dtype | None] = {
    "32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""By name of a precision, the format that autocast prefers; None: no autocast."""


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the dtype for autocast under `precision`: bfloat16 or float16; None for "32", without autocast.

    Raises:
        ConfigError: `precision` is not "32", "bf16" or "fp16".
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"There is no precision {precision!r}.",
            hint=near_matches(str(precision), PRECISIONS) or f"Use one of {', '.join(PRECISIONS)}.",
        )
    return PRECISIONS[precision]


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Run the forward passes of `model` under autocast, and convert their results to float32.

    Args:
        model: the module to change. Copies of the module run under autocast too.
        device: the device of its inputs.
        dtype: the dtype for autocast; None: the module is not changed.
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
        return pytree.tree_map(lambda value: _in_float32(value, dtype), results)

    # Use hooks instead of replacing `forward`: in a deep copy of the module, a replaced `forward` would still
    # run the weights of the original.
    # Exclude the hooks from torch.compile, which (2.13) can't trace a change of autocast in a hook.
    model.register_forward_pre_hook(torch.compiler.disable(enter))  # type: ignore[no-untyped-call]
    model.register_forward_hook(torch.compiler.disable(leave), always_call=True)  # type: ignore[no-untyped-call]


def _in_float32(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == dtype:
        return value.float()
    return value


class LossScaler:
    """Loss scaler for fp16; it also skips steps of optimizers whose gradients are infinite or NaN.

    All ranks skip the same steps, because they have the same averaged gradients.

    Args:
        device: the device of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type)
        self._has_scaled = False
        self._optimizers: list[Optimizer] = []
        self._finite: dict[int, bool] = {}
        """By id of each optimizer with unscaled gradients, whether its gradients are finite."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        self._update()
        self._has_scaled = True
        return self._scaler.scale(loss)

    def factor(self) -> torch.Tensor:
        """Return the scale of the running backward pass, a scalar on the device of the gradients."""
        factor: torch.Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return factor

    def follow(self, optimizer: Optimizer) -> None:
        """Register a hook that unscales the gradients before each step of `optimizer`.

        Raises:
            ConfigError: `optimizer` is not an optimizer of torch, and so has no step hooks.
        """
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"A {type(optimizer).__name__} can't be used in fp16: it has no step hooks.",
                hint='Use a subclass of torch.optim.Optimizer, or precision="bf16".',
            )
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Unscale the gradients before a step; if any is not finite, remove all gradients, to skip the step.

        Without gradients torch's optimizers change nothing. But their `step` is called, so that hooks and
        schedulers count the step; a scheduler would warn of a missing call.
        """
        # The first element of `args` is the optimizer; any other argument is a closure.
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step was given a closure, which fp16 does not support: "
                "its gradients would not be unscaled.",
                hint='Use an optimizer without closures, or precision="bf16".',
            )

        if not self._unscale(optimizer):
            for parameter in _trained(optimizer):
                parameter.grad = None

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Unscale the gradients of all followed optimizers that have any of `parameters`.

        Gradients that were already unscaled in this step stay.

        Raises:
            ConfigError: a parameter with a gradient belongs to no optimizer given to `follow`.
        """
        left = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for optimizer in self._optimizers:
            trained = {id(parameter) for parameter in _trained(optimizer)}
            if left & trained:
                self._unscale(optimizer)
                left -= trained

        if left:
            raise ConfigError(
                f"{len(left)} parameters with gradients belong to no optimizer of setup_optimizer, so their "
                "gradients can't be unscaled in fp16.",
                hint="Call setup_optimizer first, or clip the gradients of an optimizer instead of a model.",
            )

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients of `optimizer`, once per step; return whether all are finite."""
        if id(optimizer) in self._finite:
            return self._finite[id(optimizer)]
        if all(parameter.grad is None for parameter in _trained(optimizer)):
            return True
        if not self._has_scaled:
            raise ConfigError(
                "An optimizer has gradients that d.backward did not compute.",
                hint="In fp16, call d.backward(loss) instead of loss.backward().",
            )

        self._scaler.unscale_(optimizer)
        overflows = self._scaler._found_inf_per_device(optimizer).values()
        self._finite[id(optimizer)] = not any(overflow.item() for overflow in overflows)
        return self._finite[id(optimizer)]

    def _update(self) -> None:
        """Lower the scale if gradients were not finite; raise it after many steps with finite gradients.

        Optimizers that have not stepped still have gradients with the old scale. These are multiplied by the
        ratio of the new and the old scale.
        """
        if not self._finite:
            return

        waiting = [optimizer for optimizer in self._optimizers if id(optimizer) not in self._finite]
        self._finite.clear()
        # If no optimizer has gradients with the old scale, don't read it: reading waits for the GPU.
        if not waiting:
            self._scaler.update()
            return

        scale_before = self._scaler.get_scale()
        self._scaler.update()
        factor = self._scaler.get_scale() / scale_before
        if factor == 1:
            return
        for optimizer in waiting:
            for parameter in _trained(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of finite steps since its last change."""
        self._update()
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`; an empty mapping resets to the initial scale."""
        self._scaler = torch.amp.GradScaler(self._device.type)
        if state:
            self._scaler.load_state_dict(dict(state))

        self._finite.clear()
        self._has_scaled = False


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
