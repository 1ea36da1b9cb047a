"""Check the data set of `data._target_` and read its optional methods; see docs/guides/data.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from slurmddp.errors import ConfigError


def checked(data: Any, readers: int) -> Dataset[Any]:
    """Return `data` unchanged after checking that `readers` can read it.

    Args:
        data: the result of `data._target_`.
        readers: the number of ranks times the loader workers of each rank.

    Raises:
        ConfigError: `data` is no data set of torch, is empty, or is iterable and can't be divided among
        readers.
    """
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        if readers > 1 and not hasattr(data, "set_share"):
            raise ConfigError(
                f"data is a {kind}, which is iterable and can't be divided among {readers} readers.",
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
    """Return a weighted sampler for data with `sample_weights`, None for iterable data, else a random one."""
    weights = getattr(data, "sample_weights", None)
    if isinstance(data, IterableDataset):
        if weights is not None:
            raise ConfigError(
                f"data is a {type(data).__name__}, which is iterable and has sample_weights.",
                hint="Leave sample_weights out, or use map-style data: drawing by weight needs an index.",
            )
        return None

    if weights is None:
        return RandomSampler(data)
    return WeightedRandomSampler(_checked_weights(weights, data), len(data))


def _checked_weights(weights: Any, data: Any) -> list[float]:
    try:
        tensor = torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _bad_weights(data, f"is a {type(weights).__name__} that holds no numbers") from error

    if tensor.shape != (len(data),):
        raise _bad_weights(data, f"has the shape {tuple(tensor.shape)} for {len(data)} samples")
    if not torch.isfinite(tensor).all() or (tensor < 0).any() or not tensor.any():
        raise _bad_weights(data, "holds a number that is negative or not finite, or only zeros")

    return tensor.tolist()


def _bad_weights(data: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"data is a {type(data).__name__} whose sample_weights {problem}.",
        hint="Give one finite number per sample, 0 or more, at least one above 0.",
    )


def heldout_of(data: Any) -> Dataset[Any] | None:
    """Return `data.heldout()`, the data set to evaluate on; None if `data` has no such method."""
    heldout = data.heldout() if hasattr(data, "heldout") else None
    if heldout is not None and not (hasattr(heldout, "__len__") and hasattr(heldout, "__getitem__")):
        raise ConfigError(
            f"{type(data).__name__}.heldout() gives a {type(heldout).__name__}, which has no length or can't "
            "be indexed.",
            hint="Return map-style data: each held-out sample is read once, on any number of ranks.",
        )

    return heldout


def collate_of(*data: Any) -> Callable[[list[Any]], Any] | None:
    """Return the method `collate` of the first data set that has it; None for torch's default."""
    for data_set in data:
        method: Callable[[list[Any]], Any] | None = getattr(data_set, "collate", None)
        if method is not None:
            return method

    return None
