"""Saving and loading a training on all ranks together: named objects, positions in the data, randomness.

One rank reads and writes the folder of checkpoints, and whatever goes wrong on any rank is raised on all:
a rank that left alone would keep the others waiting in their next collective.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from slurmddp import checkpoint
from slurmddp.errors import CheckpointError, ConfigError, near_matches
from slurmddp.training import collective, rng
from slurmddp.training.loader import DistributedLoader

log = logging.getLogger(__name__)

Unwrap = Callable[[nn.Module], nn.Module]
Loaders = Sequence[DistributedLoader]


def save(
    root: Path,
    step: int,
    objects: Mapping[str, Any],
    loaders: Loaders,
    *,
    unwrap: Unwrap,
    seed: int | None,
    keep_last: int,
) -> Path:
    """Let rank 0 write the checkpoint; return its folder on all ranks when it is durable."""
    randomness = collective.gather_to_zero(rng.capture())
    error: Exception | None = None
    if randomness is not None:
        try:
            state = collect(objects, loaders, randomness, unwrap)
            meta = {"world_size": len(randomness), "seed": seed}
            root = checkpoint.write(root, step, state, meta=meta, keep_last=keep_last)
        except Exception as caught:
            error = caught
    collective.agree(error)
    return collective.from_zero(root)


def load(
    root: Path, objects: Mapping[str, Any], loaders: Loaders, *, unwrap: Unwrap, seed: int | None
) -> int | None:
    """Let rank 0 choose the newest good checkpoint, read it on all ranks, and return its step, or None."""
    chosen: Path | None = None
    error: Exception | None = None
    try:
        if collective.rank() == 0:
            chosen = checkpoint.latest(root)
    except Exception as caught:
        error = caught
    collective.agree(error)
    chosen = collective.from_zero(chosen)
    if chosen is None:
        return None
    step = 0
    try:
        step = _load_from(root.absolute() / chosen.name, objects, loaders, unwrap, seed)
    except Exception as caught:
        error = caught
    collective.agree(error)
    return step


def _load_from(
    folder: Path, objects: Mapping[str, Any], loaders: Loaders, unwrap: Unwrap, seed: int | None
) -> int:
    if not folder.is_dir():
        raise CheckpointError(
            f"Rank 0 resumes from {folder}, which does not exist on {socket.gethostname()}.",
            hint="Put the run folder on a filesystem that all nodes share.",
        )
    found = checkpoint.read(folder)
    apply(found.state, objects, loaders, unwrap)
    _restore_randomness(found, seed)
    return found.step


def _restore_randomness(found: checkpoint.Checkpoint, seed: int | None) -> None:
    saved, ranks, rank = found.state["rng"], collective.world_size(), collective.rank()
    if len(saved) == ranks:
        rng.restore(saved[rank])
        return
    log.warning("The checkpoint is of %d rank(s), not %d: random draws begin anew.", len(saved), ranks)
    rng.seed_everything(rng.derive(seed or 0, "resumed", found.step, rank))


def collect(
    objects: Mapping[str, Any], loaders: Loaders, randomness: list[Any], unwrap: Unwrap
) -> dict[str, Any]:
    """Return the state to save; `randomness` holds one entry per rank."""
    return {
        "objects": {name: _state_of(name, value, unwrap) for name, value in objects.items()},
        "loaders": [loader.state_dict() for loader in loaders],
        "rng": randomness,
    }


def _state_of(name: str, value: Any, unwrap: Unwrap) -> Any:
    if isinstance(value, nn.Module):
        return unwrap(value).state_dict()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, dict):
        return value
    raise ConfigError(
        f"{name}={value!r:.80} can't be saved: a {type(value).__name__} has no state_dict.",
        hint="Put plain values into a dict, which `load` fills again: progress={'step': 3}.",
    )


def apply(state: Mapping[str, Any], objects: Mapping[str, Any], loaders: Loaders, unwrap: Unwrap) -> None:
    """Give each object, and each loader, the state that was saved for it."""
    saved = state.get("objects")
    if not isinstance(saved, dict) or "loaders" not in state:
        raise CheckpointError(
            "The checkpoint was not written by Distributon.save.",
            hint="Read it with slurmddp.checkpoint.read.",
        )
    for name, value in objects.items():
        if name not in saved:
            raise CheckpointError(f"The checkpoint holds no {name!r}.", hint=near_matches(name, saved))
        _give(name, value, saved[name], unwrap)
    if len(loaders) != len(state["loaders"]):
        raise CheckpointError(
            f"The checkpoint knows the position of {len(state['loaders'])} data loaders, and "
            f"{len(loaders)} were set up before load.",
            hint="Call setup_dataloader for the same loaders, in the same order, before load.",
        )
    for loader, position in zip(loaders, state["loaders"], strict=True):
        loader.load_state_dict(position)


def _give(name: str, value: Any, saved: Any, unwrap: Unwrap) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(saved)
        return
    if not hasattr(value, "load_state_dict"):
        raise ConfigError(
            f"{name}={value!r:.80} can't be loaded into: a {type(value).__name__} has no load_state_dict.",
            hint="Give an object that has one, or a dict.",
        )
    target = unwrap(value) if isinstance(value, nn.Module) else value
    try:
        target.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint's {name} does not fit this {type(target).__name__}: {error}",
            hint="It was written with another configuration: go back to that, or choose another run name.",
        ) from error
