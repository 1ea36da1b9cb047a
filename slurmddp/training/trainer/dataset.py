"""Checks the data set of `data._target_` and reads its optional methods; see docs/data.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from slurmddp.errors import ConfigError


def checked(data: Any, readers: int) -> Dataset[Any]:
    """Return `data` if it fits `readers`: the number of ranks times the loader workers of each."""
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        if readers > 1 and not hasattr(data, "set_share"):
            raise ConfigError(
                f"data is a {kind}, which is iterable and does not say how {readers} readers share it.",
                hint="Give it a method set_share(part, parts), after which it yields that part only.",
            )
        return data
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data is a {kind}, which has no length or can't be indexed.",
            hint="Name a map-style data set, or a subclass of torch.utils.data.IterableDataset.",
        )
    if len(data) == 0:
        raise ConfigError(
            f"data is a {kind} without a single sample.", hint="Check the folder or file that it reads."
        )
    return data  # type: ignore[no-any-return]


def sampler_for(data: Any) -> Sampler[int] | None:
    """Return the sampler of map-style data: weighted if it has `sample_weights`, else shuffled."""
    weights = getattr(data, "sample_weights", None)
    if isinstance(data, IterableDataset):
        if weights is not None:
            raise ConfigError(
                f"data is a {type(data).__name__}, which is iterable and has sample_weights.",
                hint="Only samples that have an index can be drawn by weight.",
            )
        return None
    if weights is None:
        return RandomSampler(data)
    return WeightedRandomSampler(_checked_weights(weights, data), len(data))


def _checked_weights(weights: Any, data: Any) -> list[float]:
    try:
        found = torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _bad_weights(data, f"is a {type(weights).__name__} that holds no numbers") from error
    if found.shape != (len(data),):
        raise _bad_weights(data, f"has the shape {tuple(found.shape)} for {len(data)} samples")
    if not torch.isfinite(found).all() or (found < 0).any() or not found.any():
        raise _bad_weights(data, "holds a number that is negative or not finite, or only zeros")
    return found.tolist()


def _bad_weights(data: Any, what: str) -> ConfigError:
    return ConfigError(
        f"data is a {type(data).__name__} whose sample_weights {what}.",
        hint="Give one finite number per sample, 0 or more, some above 0.",
    )


def heldout_of(data: Any) -> Dataset[Any] | None:
    """Return the data set to evaluate on, or None."""
    found = data.heldout() if hasattr(data, "heldout") else None
    if found is not None and not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{type(data).__name__}.heldout() gives a {type(found).__name__}, which has no length or can't be"
            " indexed.",
            hint="Return map-style data: each held-out sample is read once, on any number of ranks.",
        )
    return found


def collate_of(*data: Any) -> Callable[[list[Any]], Any] | None:
    """Return the method `collate` of the first data set that has it; None for torch's default."""
    found = (getattr(one, "collate", None) for one in data)
    return next((method for method in found if method is not None), None)
