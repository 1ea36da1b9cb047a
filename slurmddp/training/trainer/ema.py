"""Average the weights over the steps, exponentially weighted, for evaluation and export."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from slurmddp.errors import ConfigError


def _detach_computed(model: nn.Module) -> None:
    """Detach tensors in attributes of modules that were computed from parameters.

    `copy.deepcopy` refuses such a tensor. The old `torch.nn.utils.weight_norm` stores one, and computes it
    again before each forward pass.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())


class AverageOfWeights:
    """Exponential moving average of a model's weights: average = decay * average + (1 - decay) * weights.

    The average starts at the initial weights. Buffers, such as the statistics of batch normalisation, are
    copied, not averaged.

    Args:
        model: a module given to `setup_model`. Each rank averages its own weights.
        decay: a number between 0 and 1. The average covers about the last 1 / (1 - decay) steps.

    Raises:
        ConfigError: the model can't be copied.

    Source:
        Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; computed by
        torch.optim.swa_utils.AveragedModel.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._source = model
        _detach_computed(model)

        try:
            self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"train.ema={decay} needs a copy of the model, and {type(model).__name__} can't be copied: "
                f"{error}",
                hint="Make copy.deepcopy(model) work, or leave train.ema out.",
            ) from error

        self.model: nn.Module = self._averaged.module
        """A copy of the model with the averaged weights, under the same names."""
        self.model.requires_grad_(False)
        # torch replaces the average by the weights if it has counted no update. Checkpoints don't store its
        # count, so set it to 1: a resumed average is then kept.
        self._averaged.n_averaged.fill_(1)

    def update(self) -> None:
        """Update the average with the current weights; called after each optimizer step."""
        self._averaged.update_parameters(self._source)
