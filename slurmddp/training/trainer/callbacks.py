"""Calls objects of the user's own at fixed moments of the training; their state is part of the checkpoints.

callbacks:
  norm: {_target_: my_project.WeightNorm}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from slurmddp.errors import ConfigError, near_matches
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.components import Components


class RunningTraining(Protocol):
    """The training that calls the callbacks, as far as they may use it."""

    step: int
    """The number of completed steps."""
    distributon: Distributon
    components: Components


class Callback(Protocol):
    """The methods that a callback may have; none of them is needed. All ranks call each of them.

    A method may use `bare_model`, `optimizer`, `scheduler`, `data` and `settings` of the components, and
    collectives of `distributon`, such as `all_reduce`. A callback with `state_dict` and `load_state_dict`
    resumes in the state of the checkpoint.
    """

    def on_train_start(self, training: RunningTraining) -> None:
        """Before the first step of this attempt, after the state is loaded."""

    def on_step_end(self, training: RunningTraining) -> None:
        """After each optimizer step. Don't read values on a GPU here: each one makes it wait."""

    def on_evaluation_end(self, training: RunningTraining, metrics: Mapping[str, float]) -> None:
        """After an evaluation, with `eval_loss` and the metrics, equal on all ranks."""

    def on_save(self, training: RunningTraining) -> None:
        """Before the state is copied for a checkpoint, so that changes made here are part of it."""

    def on_train_end(self, training: RunningTraining) -> None:
        """After the last step, its evaluation and its checkpoint; not at a stop that is resumed later."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a training, by name, in the order of the configuration.

    Args:
        named: objects with at least one method of `Callback`.

    Raises:
        ConfigError: an object has none of the methods, or one that would never be called.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        for name, one in named.items():
            _check(name, one)
        self._stateful = {
            name: one
            for name, one in named.items()
            if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        }
        self._methods = {
            hook: [getattr(one, hook) for one in named.values() if hasattr(one, hook)] for hook in _HOOKS
        }

    @property
    def has_state(self) -> bool:
        """Whether checkpoints hold a state of a callback."""
        return bool(self._stateful)

    def call(self, hook: str, training: RunningTraining, *args: Any) -> None:
        """Call the method `hook` of all callbacks that have it."""
        for method in self._methods[hook]:
            method(training, *args)

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self._stateful.items():
            one.load_state_dict(state[name])


def _check(name: str, callback: Any) -> None:
    kind = type(callback).__name__
    found = [one for one in dir(callback) if one.startswith("on_")]
    if not found:
        raise ConfigError(
            f"callbacks.{name} gives a {kind}, which has no method of a callback.",
            hint=f"Its methods are any of {', '.join(_HOOKS)}.",
        )
    for one in found:
        if one not in _HOOKS:
            raise ConfigError(
                f"callbacks.{name} gives a {kind} with a method {one}, which would never be called.",
                hint=near_matches(one, _HOOKS),
            )
