"""Strategies, by name: how replicas stay equal; and the protocol of a new strategy.

A strategy knows torch's parallel wrappers. It knows neither the launcher nor the rendezvous.
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


@runtime_checkable
class Strategy(Protocol):
    """The methods of a strategy."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the module to call in training; called on all ranks, with `model` on `device`."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes do not average gradients over ranks."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `wrap`."""


STRATEGIES: dict[str, Callable[..., Strategy]] = {"ddp": DataParallel, "single": Single}


def build(name: str, **options: Any) -> Strategy:
    """Return the strategy `name`; `options` are the keys of its file in conf/strategy."""
    if name not in STRATEGIES:
        raise ConfigError(f"There is no strategy {name!r}.", hint=near_matches(name, STRATEGIES))
    try:
        return STRATEGIES[name](**options)
    except TypeError as error:
        raise ConfigError(
            f"Strategy {name!r} refused its options {options}: {error}.",
            hint="Its options are the keys of conf/strategy/" + name + ".yaml.",
        ) from error


__all__ = ["STRATEGIES", "Strategy", "build"]
