"""Train fully sharded: each of N ranks keeps 1/N of parameters, gradients and optimizer state.

torch's fully_shard (FSDP2) gathers the parameters of one unit, such as a transformer block, just before they
are used, and sums and scatters the gradients of the unit after its backward pass.

Source:
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from slurmddp.checkpoint.state.shards import has_shards
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.strategies.replicas import broadcast_from_rank_zero, refuse_sparse, require_trainable

_UNSHARDABLE_OPTIMIZERS = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Rprop") if hasattr(torch.optim, name)
)
"""Optimizers with operations that torch has for whole tensors only (2.13)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Fsdp:
    """Strategy of torch's FSDP2 (fully_shard); one process without a process group uses the bare model.

    Args:
        wrap: class names of the modules whose parameters are gathered together, as one unit each. None: the
            children of each ModuleList and Sequential whose children are all of one class. The remaining
            parameters form one more unit.
        param_dtype: dtype of the gathered parameters: "float32", "bfloat16" or "float16"; None: unchanged.
        reduce_dtype: dtype in which gradients are summed; None: `param_dtype`.
        reshard_after_forward: whether the ranks free gathered parameters after the forward pass, and gather
            them again for the backward pass. This takes less memory and 1.5 times the messages.
        activation_checkpointing: whether the activations of each unit are freed after the forward pass, and
            computed again in the backward pass.

    Raises:
        ConfigError: a dtype has another name than these three.
    """

    def __init__(
        self,
        *,
        wrap: Sequence[str] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        self._classes = wrap
        self._param_dtype = _dtype("param_dtype", param_dtype)
        self._reduce_dtype = _dtype("reduce_dtype", reduce_dtype)
        self._reshards = reshard_after_forward
        self._recomputes = activation_checkpointing

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        units = units_of(model, self._classes)
        if self._recomputes:
            for unit in units:
                unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)

        if not distributed.is_initialized():
            return model

        # Import here, because the import takes half a second, which other strategies save.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        require_trainable(model)
        refuse_sparse(model, "strategy=fsdp")
        _refuse_empty(model)
        broadcast_from_rank_zero(model)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self._param_dtype, reduce_dtype=self._reduce_dtype)

        for module in (*units, model):
            try:
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshards)
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(
                    f"strategy=fsdp can't shard {type(module).__name__}: {error}",
                    hint="Change the model accordingly, or use strategy=ddp.",
                ) from error

        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return `optimizer` unchanged, after a check that it can step sharded parameters.

        Raises:
            ConfigError: torch's implementation of the optimizer can't step sharded parameters.
        """
        if has_shards(model) and isinstance(optimizer, _UNSHARDABLE_OPTIMIZERS):
            raise ConfigError(
                f"torch's {type(optimizer).__name__} can't step the sharded parameters of strategy=fsdp.",
                hint="Use another optimizer, such as AdamW, or strategy=ddp.",
            )

        return optimizer

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        # Without a process group the model is not wrapped and lacks this method of FSDP, so do nothing.
        set_sync = getattr(model, "set_requires_gradient_sync", lambda syncs: None)
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


def _refuse_empty(model: nn.Module) -> None:
    empty = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() == 0
    ]
    if empty:
        raise ConfigError(
            f"strategy=fsdp can't shard {empty[0]} of {type(model).__name__}, a parameter without elements.",
            hint="Remove the parameter, set its requires_grad to False, or use strategy=ddp.",
        )


def units_of(model: nn.Module, classes: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the modules of `model` whose parameters FSDP gathers together, as one unit each.

    No unit contains another unit. A module that shares a parameter with a module outside of it is no unit,
    because a parameter can be in one unit only.

    Args:
        model: the module to shard.
        classes: class names of the units. None: the children of each ModuleList and Sequential whose children
            are all of one class.

    Raises:
        ConfigError: the model has no module of a named class.

    Example:
        units_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))  # both layers
    """
    present = {type(module).__name__ for module in model.modules()}
    for name in classes or ():
        if name not in present:
            raise ConfigError(
                f"strategy.wrap names {name}, but {type(model).__name__} has no module of this class.",
                hint=near_matches(name, present),
            )

    uses = _uses(model)
    return [unit for unit in dict.fromkeys(_units(model, classes)) if _uses(unit).items() <= uses.items()]


def _uses(model: nn.Module) -> Counter[int]:
    """Return, by id of each parameter, the number of modules in `model` that own the parameter directly."""
    return Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )


def _units(module: nn.Module, classes: Sequence[str] | None) -> Iterator[nn.Module]:
    """Yield the units within `module` as `units_of` does, but also those that share parameters."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    is_stack = isinstance(module, (nn.ModuleList, nn.Sequential)) and len({*map(type, children)}) == 1

    for child in children:
        if classes is not None:
            is_unit = type(child).__name__ in classes
        else:
            # A ModuleList or ModuleDict is no unit: torch gathers a unit before its forward pass, and these
            # have none.
            is_unit = is_stack and not isinstance(child, (nn.ModuleList, nn.ModuleDict))

        if is_unit:
            yield child
        else:
            yield from _units(child, classes)


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ConfigError(f"strategy.{option} is {name!r}.", hint=f"Choose one of {', '.join(DTYPES)}.")
    return None if name is None else DTYPES[name]
