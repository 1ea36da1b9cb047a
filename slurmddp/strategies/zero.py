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
    """Optimizer whose state is sharded over the ranks, but gathered for checkpoints."""

    def consolidate(self) -> None:
        """Gather the whole state on each rank's CPU, for the next `state_dict`. All ranks must call it."""
        self._all_state_dicts = gather(self.optim.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state; each rank keeps only the states of the parameters of its share."""
        # Clear the old states first: torch would keep the state of a parameter that has none in `state_dict`.
        self.optim.state.clear()
        super().load_state_dict(state_dict)

    def step(self, *args: Any, **options: Any) -> float | None:  # type: ignore[override]
        # Delete the gathered state, so that a state from before this step is never saved after it.
        self._all_state_dicts = []
        loss: float | None = super().step(*args, **options)
        return loss


def shard(optimizer: Optimizer) -> ShardedOptimizer:
    """Return an optimizer of the same class and settings whose state is sharded over the ranks.

    Raises:
        ConfigError: the optimizer has taken a step, or torch can't shard it.
    """
    kind = type(optimizer)
    # A state does not prove that a step was taken: Adagrad creates its state in the constructor. So the step
    # numbers in the states decide. A state without a step number counts as the state of a step.
    if any(float(state.get("step", 1)) for state in optimizer.state.values() if state):
        raise ConfigError(
            f"This {kind.__name__} has a state from earlier steps, which zero_optimizer can't shard.",
            hint="Call setup_optimizer before the first step and before load.",
        )

    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        return ShardedOptimizer(groups, kind, **defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"strategy.zero_optimizer can't shard this {kind.__name__}: {error}",
            hint="Use an optimizer of torch with dense parameters of one dtype, or zero_optimizer=false.",
        ) from error
