"""Call the user's objects at fixed moments of the training; their states are part of the checkpoints.

callbacks:
  norm: {_target_: my_project.WeightNorm}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.components import Components


class RunningTraining(Protocol):
    """Protocol of the training object that a callback gets: the attributes that it may use."""

    step: int
    """The number of completed steps."""
    distributon: Distributon
    components: Components


class Callback(Protocol):
    """The methods that a callback may have; each is optional, and is called on all ranks.

    A method may use `bare_model`, `optimizer`, `scheduler`, `data` and `settings` of
    `training.components`, and collectives of `training.distributon`, such as `all_reduce`. If a callback has
    `state_dict` and `load_state_dict`, checkpoints contain its state, and a resume restores it.
    """

    def on_train_start(self, training: RunningTraining) -> None:
        """Called before the first step of this attempt, after the state is loaded."""

    def on_step_end(self, training: RunningTraining) -> None:
        """Called after each optimizer step. Don't read values on a GPU: each read waits for the GPU."""

    def on_evaluation_end(self, training: RunningTraining, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, with `eval_loss` and the metrics, equal on all ranks."""

    def on_save(self, training: RunningTraining) -> None:
        """Called before the state is copied for a checkpoint.

        The checkpoint contains changes of this method.
        """

    def on_train_end(self, training: RunningTraining) -> None:
        """Called after the last step, its evaluation and its checkpoint; not if training stops earlier."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a training, by name, in the order of the configuration.

    Args:
        named: objects with at least one method of `Callback`.

    Raises:
        ConfigError: an object has none of the methods, or a method `on_...` that would never be called.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        for name, callback in named.items():
            _check(name, callback)

        self._stateful = {
            name: callback
            for name, callback in named.items()
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        }
        self._methods = {
            hook: [getattr(callback, hook) for callback in named.values() if hasattr(callback, hook)]
            for hook in _HOOKS
        }

    @property
    def has_state(self) -> bool:
        """Whether any callback has a state for checkpoints."""
        return bool(self._stateful)

    def call(self, hook: str, training: RunningTraining, *args: Any) -> None:
        """Call the method `hook` of all callbacks that have it."""
        for method in self._methods[hook]:
            method(training, *args)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._stateful.items():
            callback.load_state_dict(state[name])


def _check(name: str, callback: Any) -> None:
    kind = type(callback).__name__
    methods = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
    if not methods:
        raise ConfigError(
            f"callbacks.{name} gives a {kind}, which has no method of a callback.",
            hint=f"Give it one or more of {', '.join(_HOOKS)}.",
        )

    for method in methods:
        if method not in _HOOKS:
            raise ConfigError(
                f"callbacks.{name} gives a {kind} with a method {method}, which would never be called.",
                hint=near_matches(method, _HOOKS),
            )
