"""Saving and loading a training on all ranks together: named objects, positions in the data, randomness.

One rank reads and writes the folder of checkpoints, and whatever goes wrong on any rank is raised on all:
a rank that left alone would keep the others waiting in their next collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slurmddp import checkpoint
from slurmddp.checkpoint import config_match, fit, views
from slurmddp.errors import CheckpointError, ConfigError, near_matches
from slurmddp.runs.checkpoints import load_manifest
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
    config: Mapping[str, Any] | None = None,
    keep_last: int,
) -> Path:
    """Let rank 0 write the checkpoint; return its folder on all ranks when it is durable."""
    randomness = collective.gather_to_zero(_of_this_rank(loaders))
    error: Exception | None = None
    if randomness is not None:
        try:
            state = collect(objects, loaders, randomness, unwrap)
            meta = {"world_size": len(randomness), "seed": seed, **config_match.facts(config)}
            root = checkpoint.write(root, step, state, meta=meta, keep_last=keep_last)
        except Exception as caught:
            error = caught
    collective.agree(error)
    return collective.from_zero(root)


def rehearse(
    root: Path, objects: Mapping[str, Any], loaders: Loaders, *, unwrap: Unwrap, keep_last: int
) -> float:
    """Let rank 0 write, read back and remove what `save` would write; return the seconds that it took."""
    started = time.perf_counter()
    randomness = collective.gather_to_zero(_of_this_rank(loaders))
    error: Exception | None = None
    if randomness is not None:
        try:
            state = collect(objects, loaders, randomness, unwrap)
            checkpoint.rehearse(root, state, growth=_growth(objects), keep_last=keep_last)
        except Exception as caught:
            error = caught
    collective.agree(error)
    return collective.from_zero(time.perf_counter() - started)


def _growth(objects: Mapping[str, Any]) -> int:
    """Return how many bytes the optimizers' states will have after the first step and don't have yet."""
    return sum(_first_step_bytes(value) for value in objects.values() if isinstance(value, Optimizer))


def _first_step_bytes(optimizer: Optimizer) -> int:
    """Estimate from the settings that torch's optimizers share: Adam keeps two copies, momentum one."""
    if optimizer.state:
        return 0
    copies = 2 if "betas" in optimizer.defaults else 1 if optimizer.defaults.get("momentum") else 0
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    trained_bytes: int = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return copies * trained_bytes


def load(
    root: Path,
    objects: Mapping[str, Any],
    loaders: Loaders,
    *,
    unwrap: Unwrap,
    seed: int | None,
    config: Mapping[str, Any] | None = None,
    allow_other_config: bool = False,
) -> int | None:
    """Let rank 0 choose the newest good checkpoint, read it on all ranks, and return its step, or None."""
    chosen: tuple[str, str] | None = None
    error: Exception | None = None
    try:
        if collective.rank() == 0:
            chosen = _choose(root, config, allow_other_config)
    except Exception as caught:
        error = caught
    collective.agree(error)
    chosen = collective.from_zero(chosen)
    if chosen is None:
        return None
    return _load_from(root.absolute() / chosen[0], chosen[1], objects, loaders, unwrap, seed)


def _choose(root: Path, config: Mapping[str, Any] | None, allow: bool) -> tuple[str, str] | None:
    """Return name and mark of the checkpoint to load; raises ConfigError for one of another configuration."""
    folder = checkpoint.latest(root)
    if folder is None:
        return None
    config_match.check(load_manifest(folder).meta, config, folder.name, allow=allow)
    return folder.name, views.mark_of(folder)


def _load_from(
    folder: Path, mark: str, objects: Mapping[str, Any], loaders: Loaders, unwrap: Unwrap, seed: int | None
) -> int:
    """Read and check on all ranks before any of them changes anything."""
    found: checkpoint.Checkpoint | None = None
    error: Exception | None = None
    try:
        views.await_same(folder, mark)
        found = checkpoint.read(folder)
        certain = check(found.state, objects, loaders, unwrap)
    except Exception as caught:
        error = caught
    collective.agree(error)
    try:
        if found is not None:
            apply(found.state, objects, loaders, unwrap, certain)
            _restore_data(found, loaders)
            _restore_randomness(found, seed)
    except Exception as caught:
        error = caught
    collective.agree(error)
    return found.step if found is not None else 0


def _of_this_rank(loaders: Loaders) -> dict[str, Any]:
    """Return what each rank has to save of its own: randomness, and places in data that it reads alone."""
    places = [loader.rank_state() for loader in loaders]
    return rng.capture() | ({"data": places} if any(place is not None for place in places) else {})


def _restore_data(found: checkpoint.Checkpoint, loaders: Loaders) -> None:
    saved = found.state["rng"]
    if len(saved) != collective.world_size():
        return  # A loader that has places of its own has refused that already.
    for loader, place in zip(loaders, saved[collective.rank()].get("data", []), strict=False):
        if place is not None:
            loader.load_rank_state(place)


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


def check(
    state: Mapping[str, Any], objects: Mapping[str, Any], loaders: Loaders, unwrap: Unwrap
) -> frozenset[str]:
    """Raise unless `state` can be loaded; return the names of the objects that are certain to take theirs."""
    saved = state.get("objects")
    if not isinstance(saved, dict) or "loaders" not in state:
        raise CheckpointError(
            "The checkpoint was not written by Distributon.save.",
            hint="Read it with slurmddp.checkpoint.read.",
        )
    if len(loaders) != len(state["loaders"]):
        raise CheckpointError(
            f"The checkpoint knows the position of {len(state['loaders'])} data loaders, and "
            f"{len(loaders)} were set up before load.",
            hint="Call setup_dataloader for the same loaders, in the same order, before load.",
        )
    for number, loader in enumerate(loaders):
        loader.check_rank_states([rank["data"][number] for rank in state.get("rng", []) if "data" in rank])
    for name, value in objects.items():
        if name not in saved:
            raise CheckpointError(f"The checkpoint holds no {name!r}.", hint=near_matches(name, saved))
        if not isinstance(value, dict) and not hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"{name}={value!r:.80} can't be loaded into: a {type(value).__name__} "
                "has no load_state_dict.",
                hint="Give an object that has one, or a dict.",
            )
    return frozenset(
        name
        for name, value in objects.items()
        if isinstance(value, dict) or fit.check(name, _bare(value, unwrap), saved[name])
    )


def apply(
    state: Mapping[str, Any],
    objects: Mapping[str, Any],
    loaders: Loaders,
    unwrap: Unwrap,
    certain: Collection[str],
) -> None:
    """Give each object, and each loader, the state that was saved for it, or leave all of them as they are.

    Those that may still refuse theirs come first; what was loaded before a refusal is taken back.
    """
    saved = state["objects"]
    with ExitStack() as undo:
        for name, value in objects.items():
            if name not in certain:
                target = _bare(value, unwrap)
                undo.callback(fit.undo_for(target))
                _load_into(name, target, saved[name])
        for loader, position in zip(loaders, state["loaders"], strict=True):
            undo.callback(loader.go_back, loader.mark())
            loader.load_state_dict(position)
        undo.pop_all()
    for name in certain:
        if isinstance(objects[name], dict):
            objects[name].clear()
            objects[name].update(saved[name])
        else:
            _load_into(name, _bare(objects[name], unwrap), saved[name])


def _load_into(name: str, target: Any, saved: Any) -> None:
    try:
        target.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise fit.misfit(name, target, str(error)) from error


def _bare(value: Any, unwrap: Unwrap) -> Any:
    return unwrap(value) if isinstance(value, nn.Module) else value
