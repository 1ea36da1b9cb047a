"""Replicas that train apart, and agree on their weights every few steps.

`LocalSgd` averages the weights (Stich 2019, arXiv:1805.09767). `DiLoCo` takes the mean change of the weights
for the gradient of an outer optimizer (Douillard et al. 2023, arXiv:2311.08105).
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
    """Train each replica alone, and average the weights of all ranks every few steps.

    Between two averages the replicas differ. So each rank's weights and optimizer belong to its part of a
    checkpoint, and the model of a checkpoint is rank 0's replica.

    Args:
        every: steps between two averages.
        warmup_steps: first steps, after each of which the ranks average.

    Raises:
        ConfigError: a number is too small.
    """

    averages_gradients = False

    def __init__(self, *, every: int = 8, warmup_steps: int = 0) -> None:
        for name, value, least in (("every", every, 1), ("warmup_steps", warmup_steps, 0)):
            if value < least:
                raise ConfigError(f"strategy.{name} is {value}.", hint=f"Give {least} or more.")
        self._every, self._warmup_steps = every, warmup_steps
        self._models: list[nn.Module] = []
        self._replicas: list[_Replica] = []

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._models.append(super().wrap(model, device))
        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return the optimizer, after whose steps the weights that it trains are averaged.

        Args:
            optimizer: the optimizer of parameters of `model`, and perhaps of other models.
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
        """Return this rank's counters, and its weights and optimizers if the replicas differ."""
        replicas = [replica.state_dict() for replica in self._replicas]
        return {"strategy": type(self).__name__, "replicas": replicas}

    def reset(self) -> None:
        """Forget all steps; weights and optimizers stay as they are."""
        for replica in self._replicas:
            replica.load_state_dict({"steps": 0})

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if `load_state_dict` can't restore a state."""
        if self._is_own(state):
            if (saved := len(state["replicas"])) != (here := len(self._replicas)):
                problem = f"it has the replicas of {saved} optimizers, and {here} were set up before load"
                raise compatibility.misfit("state of the strategy", self, problem)
            for replica, one in zip(self._replicas, state["replicas"], strict=True):
                replica.check_state_dict(one)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore this rank's result of `state_dict`, after models and optimizers have got their states.

        Returns:
            False if the state is of another strategy, and left out.
        """
        if not self._is_own(state):
            return False
        for replica, saved in zip(self._replicas, state["replicas"], strict=True):
            replica.load_state_dict(saved)
        return True

    def _is_own(self, state: dict[str, Any]) -> bool:
        # DiLoCo could never agree on replicas of `local_sgd` that are apart: it averages their changes.
        name = type(self).__name__
        return "replicas" in state and state.get("strategy", name) == name


class DiLoCo(LocalSgd):
    """Train each replica alone; every few steps an outer optimizer takes one step for all of them.

    Its gradient is the mean change of the replicas since its last step, its optimizer SGD with Nesterov's
    momentum. One exchange in `every` steps divides the traffic by `every`.

    Args:
        every: steps between two outer steps.
        outer_lr: learning rate of the outer optimizer; 1 without momentum averages the weights.
        outer_momentum: momentum of the outer optimizer; 0: none.

    Raises:
        ConfigError: a number is too small, or the momentum is not below 1.
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
    """The weights of all models that one optimizer of this rank trains, and the number of its steps.

    Args:
        optimizer: may get further groups of parameters later.
        models: all models of the training.
    """

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        self.steps, self.is_apart = 0, False
        self._optimizer, self._all_models = optimizer, models

    @property
    def _models(self) -> nn.ModuleList:
        return nn.ModuleList(one for one in self._all_models if trains(self._optimizer, one))

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return [one for one in self._models.buffers() if one.is_floating_point()]

    def begin(self) -> None:
        """Take note of the weights before a step."""

    def agree(self) -> None:
        """Make the replicas equal; all ranks call it after the same step."""
        with torch.no_grad():
            average([*self._weights, *self._buffers])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps}
        if self.is_apart:
            state |= {"models": self._models.state_dict(), "optimizer": self._optimizer.state_dict()}
        elif any(self._optimizer.state_dict()["state"].values()):
            state |= {"optimizer": self._optimizer.state_dict()}  # Equal weights, but moments of one rank.
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        for name, target in (("models", self._models), ("optimizer", self._optimizer)):
            if name in state:
                compatibility.check(f"{name} of a replica", target, state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.is_apart = state["steps"], "models" in state
        if "models" in state:
            self._models.load_state_dict(state["models"])
        if "optimizer" in state:
            load_optimizer(self._optimizer, state["optimizer"])


class _OuterReplica(_Replica):
    """A replica whose weights follow an outer optimizer."""

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module], outer: dict[str, Any]) -> None:
        super().__init__(optimizer, models)
        self._settings = outer
        self._outer: SGD | None = None
        """The outer optimizer; None before the first step, because a load may come before it."""
        self._agreed: list[torch.Tensor] = []
        """The weights after the last outer step."""

    def begin(self) -> None:
        if self._outer is None:
            self._start_outer([one.detach().clone() for one in self._weights])
        elif added := self._weights[len(self._agreed) :]:
            new = [one.detach().clone().requires_grad_() for one in added]
            self._agreed += new
            self._outer.param_groups[0]["params"] += new  # A load makes one group of all weights.

    def _start_outer(self, agreed: Sequence[torch.Tensor]) -> SGD:
        self._agreed = [one.requires_grad_() for one in agreed]
        self._outer = SGD(self._agreed, **self._settings)
        return self._outer

    def agree(self) -> None:
        outer = self._outer or self._start_outer([one.detach().clone() for one in self._weights])
        with torch.no_grad():
            changes = [old - new for old, new in zip(self._agreed, self._weights, strict=True)]
            average([*changes, *self._buffers])
            for old, change in zip(self._agreed, changes, strict=True):
                old.grad = change
            outer.step()
            for old, new in zip(self._agreed, self._weights, strict=True):
                new.copy_(old)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._outer is not None:
            state |= {"agreed": [one.detach() for one in self._agreed], "outer": self._outer.state_dict()}
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        shapes = [one.shape for one in self._weights]
        if "agreed" in state and [one.shape for one in state["agreed"]] != shapes[: len(state["agreed"])]:
            raise compatibility.misfit("agreed weights", self._optimizer, "they have other shapes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._outer = None
        if "agreed" in state:
            agreed = [
                saved.detach().to(like.device, copy=True)
                for saved, like in zip(state["agreed"], self._weights, strict=False)
            ]
            outer = self._start_outer(agreed)
            outer.load_state_dict(state["outer"])
            outer.param_groups[0].update(self._settings)  # Those of this run: they may have changed.
