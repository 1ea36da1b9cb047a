"""Train the replicas of a model independently, and make their weights equal every few steps.

`LocalSgd` averages the weights (Stich 2019, arXiv:1805.09767). `DiLoCo` uses the mean change of the weights
as the gradient of an outer optimizer (Douillard et al. 2023, arXiv:2311.08105).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import SGD, Optimizer

from slurmddp.checkpoint.state import compatibility
from slurmddp.checkpoint.state.optimizers import load_optimizer
from slurmddp.errors import ConfigError
from slurmddp.strategies.replicas import Replicas, average, trains


class LocalSgd(Replicas):
    """Strategy that trains each replica alone, and averages the weights of all ranks every few steps.

    Between two averages the replicas differ. So a checkpoint contains the weights and optimizers of each
    rank, and its model is the replica of rank 0.

    Args:
        every: steps between two averages.
        warmup_steps: number of first steps after each of which the weights are averaged.

    Raises:
        ConfigError: a number is too small.
    """

    averages_gradients = False

    def __init__(self, *, every: int = 8, warmup_steps: int = 0) -> None:
        for name, value, minimum in (("every", every, 1), ("warmup_steps", warmup_steps, 0)):
            if value < minimum:
                raise ConfigError(f"strategy.{name} is {value}.", hint=f"Give {minimum} or more.")

        self._every = every
        self._warmup_steps = warmup_steps
        self._models: list[nn.Module] = []
        self._replicas: list[_Replica] = []

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._models.append(super().wrap(model, device))
        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return `optimizer`, with hooks in its steps that average the weights that it trains.

        Args:
            optimizer: an optimizer of parameters of `model`, and perhaps of other models.
            model: the result of `wrap`.
        """
        replica = self._replica_of(optimizer)
        self._replicas.append(replica)
        optimizer.register_step_pre_hook(lambda *_: replica.begin())
        optimizer.register_step_post_hook(lambda *_: self._step_taken(replica))

        return optimizer

    def _replica_of(self, optimizer: Optimizer) -> _Replica:
        return _Replica(optimizer, self._models)

    def _step_taken(self, replica: _Replica) -> None:
        replica.steps += 1
        past = replica.steps - self._warmup_steps
        replica.is_apart = past > 0 and past % self._every != 0
        if distributed.is_initialized() and not replica.is_apart:
            replica.agree()

    def state_dict(self) -> dict[str, Any]:
        """Return each optimizer's number of steps on this rank, and the values that differ between ranks.

        These values are the states of the optimizers and, between two averages, the weights.
        """
        replicas = [replica.state_dict() for replica in self._replicas]
        return {"strategy": type(self).__name__, "replicas": replicas}

    def reset(self) -> None:
        """Set the numbers of steps to 0; weights and optimizers stay as they are."""
        for replica in self._replicas:
            replica.load_state_dict({"steps": 0})

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if `load_state_dict` can't restore a state."""
        if not self._saved_by_same_strategy(state):
            return

        saved_replicas = state["replicas"]
        if len(saved_replicas) != len(self._replicas):
            problem = (
                f"it has the replicas of {len(saved_replicas)} optimizers, "
                f"and {len(self._replicas)} were set up before load"
            )
            raise compatibility.misfit("state of the strategy", self, problem)

        for replica, saved in zip(self._replicas, saved_replicas, strict=True):
            replica.check_state_dict(saved)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore this rank's result of `state_dict`, after models and optimizers have got their states.

        Returns:
            False if the state is ignored, because another strategy has saved it.
        """
        if not self._saved_by_same_strategy(state):
            return False

        for replica, saved in zip(self._replicas, state["replicas"], strict=True):
            replica.load_state_dict(saved)
        return True

    def _saved_by_same_strategy(self, state: dict[str, Any]) -> bool:
        # DiLoCo must not load a state of local_sgd, whose replicas may differ. It averages only the changes
        # of weights, so they would stay different.
        name = type(self).__name__
        return "replicas" in state and state.get("strategy", name) == name


class DiLoCo(LocalSgd):
    """Strategy that trains each replica alone; every few steps an outer optimizer steps the common weights.

    The outer optimizer is SGD with Nesterov momentum. Its gradient is the mean change of the replicas since
    its last step. The ranks exchange weights only in one of `every` steps.

    Args:
        every: steps between two outer steps.
        outer_lr: learning rate of the outer optimizer. 1 without momentum averages the weights, as LocalSgd
            does.
        outer_momentum: momentum of the outer optimizer; 0: none.

    Raises:
        ConfigError: a number is too small, or the momentum is 1 or more.
    """

    def __init__(self, *, every: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        super().__init__(every=every)
        if outer_lr <= 0:
            raise ConfigError(f"strategy.outer_lr is {outer_lr}.", hint="Give a number above 0.")

        if not 0 <= outer_momentum < 1:
            raise ConfigError(
                f"strategy.outer_momentum is {outer_momentum}.", hint="Give a number from 0 to below 1."
            )

        self._outer = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_momentum > 0}

    def _replica_of(self, optimizer: Optimizer) -> _Replica:
        return _OuterReplica(optimizer, self._models, self._outer)


class _Replica:
    """The weights that one optimizer of this rank trains, in all models, and the optimizer's number of steps.

    Args:
        optimizer: the optimizer. A program may add groups of parameters to it later.
        models: all models of the training.
    """

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        self.steps = 0
        self.is_apart = False
        """Whether the weights of this rank may differ now from the weights of other ranks."""
        self._optimizer = optimizer
        self._all_models = models

    @property
    def _models(self) -> nn.ModuleList:
        return nn.ModuleList(model for model in self._all_models if trains(self._optimizer, model))

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self._models.buffers() if buffer.is_floating_point()]

    def begin(self) -> None:
        """Do nothing; a subclass prepares for a step of the optimizer. Called before each step."""

    def agree(self) -> None:
        """Average the weights and buffers over all ranks, which call it after the same step."""
        with torch.no_grad():
            average([*self._weights, *self._buffers])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps}
        if self.is_apart:
            state["models"] = self._models.state_dict()
            state["optimizer"] = self._optimizer.state_dict()
        elif any(self._optimizer.state_dict()["state"].values()):
            # The weights are equal on all ranks, but the optimizers' moments are not. So each rank saves its
            # own.
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        for name, target in (("models", self._models), ("optimizer", self._optimizer)):
            if name in state:
                compatibility.check(f"{name} of a replica", target, state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.is_apart = "models" in state
        if "models" in state:
            self._models.load_state_dict(state["models"])
        if "optimizer" in state:
            load_optimizer(self._optimizer, state["optimizer"])


class _OuterReplica(_Replica):
    """A replica whose weights are replaced, every few steps, by the weights of an outer optimizer."""

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module], outer: dict[str, Any]) -> None:
        super().__init__(optimizer, models)
        self._settings = outer
        self._outer: SGD | None = None
        """The outer optimizer; None before the first step, because until then a load may replace the
        weights."""
        self._agreed: list[torch.Tensor] = []
        """The weights that all ranks had after the last outer step."""

    def begin(self) -> None:
        """Create the outer optimizer before the first step; before later steps, add new weights to it."""
        if self._outer is None:
            self._start_outer(self._copied_weights())
            return

        added = [weight.requires_grad_() for weight in self._copied_weights(len(self._agreed))]
        if added:
            self._agreed += added
            # Add the weights to the first group and not to a new one, because a load creates one group for
            # all weights.
            self._outer.param_groups[0]["params"] += added

    def _copied_weights(self, first: int = 0) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self._weights[first:]]

    def _start_outer(self, agreed: Sequence[torch.Tensor]) -> SGD:
        self._agreed = [weight.requires_grad_() for weight in agreed]
        self._outer = SGD(self._agreed, **self._settings)
        return self._outer

    def agree(self) -> None:
        outer = self._outer or self._start_outer(self._copied_weights())

        with torch.no_grad():
            changes = [agreed - weight for agreed, weight in zip(self._agreed, self._weights, strict=True)]
            average([*changes, *self._buffers])
            for agreed, change in zip(self._agreed, changes, strict=True):
                agreed.grad = change

            outer.step()
            for agreed, weight in zip(self._agreed, self._weights, strict=True):
                weight.copy_(agreed)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._outer is not None:
            state["agreed"] = [weight.detach() for weight in self._agreed]
            state["outer"] = self._outer.state_dict()
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if "agreed" not in state:
            return

        saved_shapes = [weight.shape for weight in state["agreed"]]
        shapes = [weight.shape for weight in self._weights]
        if saved_shapes != shapes[: len(saved_shapes)]:
            raise compatibility.misfit("agreed weights", self._optimizer, "they have other shapes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._outer = None
        if "agreed" not in state:
            return

        agreed = [
            saved.detach().to(weight.device, copy=True)
            for saved, weight in zip(state["agreed"], self._weights, strict=False)
        ]
        outer = self._start_outer(agreed)
        outer.load_state_dict(state["outer"])
        # Use the settings of this run, which may differ from the saved ones: its learning rate and momentum.
        outer.param_groups[0].update(self._settings)
