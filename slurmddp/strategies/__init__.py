"""How replicas agree: the strategies by name, and the seam that another strategy has to fill.

A strategy knows torch's parallel wrappers and nothing else: not how processes were started, not how they met.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from slurmddp.errors import ConfigError, near_matches
from slurmddp.strategies.ddp import DataParallel
from slurmddp.strategies.single import Single


class Standing(Protocol):
    """The part of a process's place that a strategy looks at."""

    @property
    def device(self) -> torch.device: ...


@runtime_checkable
class Strategy(Protocol):
    """What the training needs from a way to keep replicas equal."""

    def wrap(self, model: nn.Module, place: Standing) -> nn.Module:
        """Return the module to call instead of `model`; called on all ranks, with the model on its device."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes keep their gradients on this rank."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `wrap`, whose state has no prefix."""


STRATEGIES: dict[str, Callable[..., Strategy]] = {"ddp": DataParallel, "single": Single}


def build(name: str, **options: Any) -> Strategy:
    """Return the strategy called `name`; `options` are the fields of its config (see `conf/strategy`)."""
    if name not in STRATEGIES:
        raise ConfigError(f"There is no strategy {name!r}.", hint=near_matches(name, STRATEGIES))
    try:
        return STRATEGIES[name](**options)
    except TypeError as error:
        raise ConfigError(
            f"Strategy {name!r} refused its options {options}: {error}.",
            hint="Its options are the keys of conf/strategy/" + name + ".yaml.",
        ) from error


__all__ = ["STRATEGIES", "Standing", "Strategy", "build"]
