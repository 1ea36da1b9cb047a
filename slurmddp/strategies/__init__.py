"""Find a strategy by its name, and define the protocol that a strategy of a user implements.

A strategy keeps the replicas of a model on several ranks equal. It uses torch's parallel wrappers, and
depends neither on how the ranks were started nor on how they met.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from slurmddp import plugins
from slurmddp.strategies.ddp import Ddp
from slurmddp.strategies.fsdp import Fsdp
from slurmddp.strategies.local_sgd import DiLoCo, LocalSgd
from slurmddp.strategies.parameter_server import ParameterServer
from slurmddp.strategies.ring import Ring
from slurmddp.strategies.single import DataParallel, Single


class Strategy(Protocol):
    """A way to keep replicas equal: the methods that a new strategy needs.

    All ranks call `wrap` at the same place of the program, so `wrap` may call collectives.

    A strategy may have seven further methods. Each of them is called on all ranks at the same point:

    - `set_loss_scale(scale)` is called in fp16, before the first `wrap`. `scale()` returns the loss scale, by
      which all gradients are multiplied: a scalar tensor on their device.
    - `setup_optimizer(optimizer, model)` returns the optimizer that the training is to step.
    - `state_dict()` returns the strategy's state on this rank: plain values and tensors. Each checkpoint
      contains the states of all ranks.
    - `check_state_dict(state)` raises CheckpointError if the strategy can't restore a state. Each load calls
      it before it changes anything.
    - `reset()` forgets all steps. Each load calls it, after models and optimizers have got their states.
    - `load_state_dict(state)` restores a state after `reset`. It returns False if it ignores the state
      because another strategy or other settings have saved it. It is not called if the number of ranks has
      changed, or if the checkpoint has no state of this rank.
    - `close()` ends threads and connections of the strategy. It is called at an orderly end, before the rank
      leaves its process group.

    A strategy whose ranks step on their local gradients sets `averages_gradients = False`. The trainer then
    does not exchange the number of tokens of a loss in each step.
    """

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the module that the training calls in place of `model`, which is already on `device`."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes do not average gradients over ranks."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `wrap`."""


STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": Ddp,
    "ring": Ring,
    "fsdp": Fsdp,
    "local_sgd": LocalSgd,
    "diloco": DiLoCo,
    "parameter_server": ParameterServer,
    "single": Single,
    "data_parallel": DataParallel,
}


def build(name: str | Strategy | type[Strategy], **options: Any) -> Strategy:
    """Return a new strategy of the given name with the given options.

    Args:
        name: a name of `STRATEGIES`, the import path of a class, a class, or a strategy, which is returned.
        options: arguments of the class.

    Raises:
        ConfigError: there is no such strategy, it refuses its options, or it lacks a method of `Strategy`.

    Example:
        build("ddp", bucket_mb=25)
        build("my_package.EveryTenthStep", steps=10)
    """
    strategy: Strategy = plugins.build(name, STRATEGIES, Strategy, key="strategy", **options)
    return strategy


__all__ = ["STRATEGIES", "Strategy", "build"]
