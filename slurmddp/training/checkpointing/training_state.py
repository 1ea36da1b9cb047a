"""Collect and restore the state of a training: objects, positions of loaders, random states of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.state import compatibility
from slurmddp.checkpoint.state.optimizers import load_optimizer
from slurmddp.checkpoint.state.shards import fitted
from slurmddp.collectives import values as collectives
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import DistributedLoader

log = logging.getLogger(__name__)

Unwrap = Callable[[nn.Module], nn.Module]
Loaders = Sequence[DistributedLoader]


def merged(state: Mapping[str, Any] | None, objects: Mapping[str, Any], call: str) -> dict[str, Any]:
    """Return the objects of the positional mapping and the keywords of a call in one dict, by name.

    Args:
        state: the mapping, or None.
        objects: the keywords.
        call: an example of a correct call, for the error.

    Raises:
        ConfigError: `state` is not a mapping with names, or a name is given twice.
    """
    named = {} if state is None else state
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            f"{state!r:.80} is not a mapping from names to objects.",
            hint=f"Call {call}, or name the objects.",
        )

    twice = named.keys() & objects.keys()
    if twice:
        raise ConfigError(
            f"Given twice, in the mapping and as a keyword: {', '.join(sorted(twice))}.",
            hint="Give each object a name of its own.",
        )
    return {**named, **objects}


def required_step(step: Any, method: str) -> int:
    """Return the argument `step` of a save or load as an int of Python.

    Raises:
        ConfigError: `step` is not an integer of Python or NumPy.
    """
    if not isinstance(step, Integral) or isinstance(step, bool):
        raise ConfigError(
            f"{method}() was given step={step!r}, which is not an integer.",
            hint=f"The step comes first, the folder is a keyword: {method}(step, model=model, root=folder).",
        )
    return int(step)


def of_this_rank(loaders: Loaders) -> dict[str, Any]:
    """Return this rank's part of the state: random states, and positions of loaders that differ by rank.

    The positions are in the list `data`, which is missing if no loader has such a position.
    """
    state = rng.capture()
    positions = [loader.rank_state() for loader in loaders]
    if any(position is not None for position in positions):
        state["data"] = positions
    return state


def restore_data(loaded: checkpoint.Checkpoint, loaders: Loaders) -> None:
    """Restore the positions of this rank's loaders that differ by rank (see `of_this_rank`)."""
    rank_states = loaded.state["rng"]
    # `check` has already raised if a loader has such a position and the number of ranks differs.
    if len(rank_states) != collectives.world_size():
        return

    positions = rank_states[collectives.rank()].get("data", [])
    for loader, position in zip(loaders, positions, strict=False):
        if position is not None:
            loader.load_rank_state(position)


def restore_randomness(loaded: checkpoint.Checkpoint, seed: int | None) -> None:
    """Restore this rank's random state; on another number of ranks, seed from `seed` and the step."""
    rank_states = loaded.state["rng"]
    ranks = collectives.world_size()
    rank = collectives.rank()
    if len(rank_states) == ranks:
        rng.restore(rank_states[rank])
        return

    log.warning(
        "The checkpoint was saved by %d rank(s), but this training has %d. So its random states are not "
        "restored; the generators are seeded from the seed and the step.",
        len(rank_states),
        ranks,
    )
    rng.seed_everything(rng.derive(seed or 0, "resumed", loaded.step, rank))


def collect(
    objects: Mapping[str, Any], loaders: Loaders, rank_states: list[Any], unwrap: Unwrap
) -> dict[str, Any]:
    """Return the state of a training to save, collected from its objects, loaders and ranks.

    Args:
        objects: the objects by name.
        loaders: the data loaders.
        rank_states: the part of each rank, by rank.
        unwrap: returns the module inside a strategy's wrapper.

    Returns:
        A dict with "objects" (states by name), "loaders" (a list of states) and "rng" (`rank_states`).
    """
    return {
        "objects": {name: _state_of(name, value, unwrap) for name, value in objects.items()},
        "loaders": [loader.state_dict() for loader in loaders],
        "rng": rank_states,
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
        hint="Put plain values into a dict, such as progress={'step': 3}; `load` fills it again.",
    )


def check(
    state: Mapping[str, Any],
    objects: Mapping[str, Any],
    loaders: Loaders,
    unwrap: Unwrap,
    ignored: list[str] | None = None,
) -> frozenset[str]:
    """Check whether a saved state fits the objects and loaders, without changing them.

    Args:
        state: the saved state.
        objects: the objects to load it into, by name.
        loaders: the data loaders of this rank.
        unwrap: returns the module inside a strategy's wrapper.
        ignored: a list to which missing objects, keys and loaders are added as texts. None: a missing one
            raises CheckpointError.

    Returns:
        The names of the objects whose load is certain to succeed. Others may refuse their state.

    Raises:
        CheckpointError: `state` does not fit.
        ConfigError: an object is no dict and has no `load_state_dict`.
    """
    saved = state.get("objects")
    if not isinstance(saved, dict) or "loaders" not in state:
        raise CheckpointError(
            "The checkpoint was not written by Distributon.save.",
            hint="To read its values, call slurmddp.checkpoint.read(folder).",
        )

    if ignored is None and len(loaders) != len(state["loaders"]):
        raise CheckpointError(
            f"The checkpoint has the positions of {len(state['loaders'])} data loader(s), but "
            f"{len(loaders)} data loader(s) were set up before load.",
            hint="Call setup_dataloader for the same loaders, in the same order, before load.",
        )
    for number, loader in enumerate(fitting(loaders, state, ignored)):
        loader.check_rank_states([rank["data"][number] for rank in state.get("rng", []) if "data" in rank])
    for name, value in objects.items():
        _check_object(name, value, saved, ignored)

    return frozenset(
        name
        for name, value in objects.items()
        if name in saved
        if isinstance(value, dict) or compatibility.check(name, _module(value, unwrap), saved[name], ignored)
    )


def _check_object(name: str, value: Any, saved: Mapping[str, Any], ignored: list[str] | None) -> None:
    """Raise CheckpointError if an object is not in the checkpoint, ConfigError if it can't be loaded into.

    With a list `ignored`, a missing object is added to it instead.
    """
    if name not in saved:
        if ignored is None:
            raise CheckpointError(f"The checkpoint holds no {name!r}.", hint=near_matches(name, saved))
        ignored.append(f"{name}: not in the checkpoint")

    if not isinstance(value, dict) and not hasattr(value, "load_state_dict"):
        raise ConfigError(
            f"{name}={value!r:.80} can't be loaded into: a {type(value).__name__} has no load_state_dict.",
            hint="Give an object with load_state_dict, such as a module or an optimizer, or a dict.",
        )


def fitting(loaders: Loaders, state: Mapping[str, Any], ignored: list[str] | None) -> Loaders:
    """Return `loaders` if the checkpoint has as many positions; else (), and add a text to `ignored`."""
    if len(loaders) == len(state["loaders"]):
        return loaders
    if ignored is not None:
        ignored.append(
            f"data: {len(state['loaders'])} positions in the checkpoint, {len(loaders)} loaders in this run"
        )
    return ()


def apply(
    state: Mapping[str, Any],
    objects: Mapping[str, Any],
    loaders: Loaders,
    unwrap: Unwrap,
    certain: Collection[str],
    strict: bool = True,
) -> None:
    """Load the saved state into all objects and loaders, or into none of them.

    Objects that are not in `certain` are loaded first. If one of them refuses its state, the objects loaded
    before it are restored, and the error is raised.
    """
    saved = state["objects"]
    with ExitStack() as undo:
        for name, value in objects.items():
            if name in saved and name not in certain:
                target = _module(value, unwrap)
                undo.callback(compatibility.undo_for(target))
                _load_into(name, target, saved[name], strict)
        for loader, position in zip(loaders, state["loaders"], strict=bool(loaders)):
            undo.callback(loader.go_back, loader.mark())
            loader.load_state_dict(position)
        # No object can refuse its state from here on, so drop the callbacks that undo the loads.
        undo.pop_all()

    for name in certain:
        if isinstance(objects[name], dict):
            objects[name].clear()
            objects[name].update(saved[name])
        else:
            _load_into(name, _module(objects[name], unwrap), saved[name], strict)


def _load_into(name: str, target: Any, saved: Any, strict: bool) -> None:
    options = {}
    if isinstance(target, nn.Module) and not strict:
        options["strict"] = False
    saved = fitted(saved, target)
    try:
        if isinstance(target, Optimizer):
            load_optimizer(target, saved)
        else:
            target.load_state_dict(saved, **options)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise compatibility.misfit(name, target, str(error)) from error


def _module(value: Any, unwrap: Unwrap) -> Any:
    """Return a module without its strategy's wrapper, and any other object unchanged."""
    return unwrap(value) if isinstance(value, nn.Module) else value
