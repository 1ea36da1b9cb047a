"""Shard the optimizer's state (ZeRO): each rank holds the state of its share of the parameters.

Rajbhandari et al. 2019, arXiv:1910.02054, stage 1. torch partitions the parameters and exchanges them.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from slurmddp.collectives.values import gather
from slurmddp.errors import ConfigError


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer whose state is sharded over the ranks, and complete in checkpoints."""

    def consolidate(self) -> None:
        """Gather the whole state into the memory of each rank's host, for `state_dict`. All ranks call it."""
        self._all_state_dicts = gather(self.optim.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state."""
        # torch would keep the state of a parameter that has none in `state_dict`.
        self.optim.state.clear()
        super().load_state_dict(state_dict)

    def step(self, *args: Any, **options: Any) -> float | None:  # type: ignore[override]
        # A state that was gathered before the step must never be saved after it.
        self._all_state_dicts = []
        loss: float | None = super().step(*args, **options)
        return loss


def shard(optimizer: Optimizer) -> ShardedOptimizer:
    """Return an optimizer of the same class and settings whose state is sharded over the ranks.

    Raises:
        ConfigError: the optimizer has taken a step, or torch can't shard it.
    """
    kind = type(optimizer)
    # Adagrad has a state before its first step, and so has the new optimizer.
    if any(float(state.get("step", 1)) for state in optimizer.state.values() if state):
        raise ConfigError(
            f"This {kind.__name__} has a state already, which zero_optimizer can't spread.",
            hint="Call setup_optimizer before the first step and before load.",
        )

    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        return ShardedOptimizer(groups, kind, **defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"strategy.zero_optimizer can't spread this {kind.__name__}: {error}",
            hint="Take an optimizer of torch, dense parameters of one dtype, or zero_optimizer=false.",
        ) from error
