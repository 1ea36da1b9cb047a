"""Checks that a saved state fits an object before a load, so that no object is loaded in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slurmddp.checkpoint.state.optimizers import load_optimizer
from slurmddp.checkpoint.state.shards import is_sharded, mapped
from slurmddp.errors import CheckpointError
from slurmddp.short_text import first_items

_SHOWN = 3
"""Number of keys of each kind in a message; a model of another depth has hundreds."""
_HINT = (
    "It was written with another model or configuration: go back to that, or start in another folder, "
    "by another name= of the run or root= in a script."
)


def check(name: str, target: Any, saved: Any, ignored: list[str] | None = None) -> bool:
    """Return whether a load of `saved` into `target` is certain to succeed.

    Args:
        name: the name of the object in the state.
        target: a module or an optimizer. Another object decides by its own `load_state_dict`: False.
        saved: the state to load.
        ignored: a list that gets the keys of a module that only one side has. None: such keys are an error.

    Raises:
        CheckpointError: `saved` does not fit `target`.
    """
    if isinstance(target, nn.Module) and _loads_plainly(target):
        problem, keys = _module_problem(target.state_dict(), saved)
        if ignored is None:
            problem = "; ".join(filter(None, [keys, problem]))
        elif keys:
            ignored.append(f"{name}: {keys}")
    elif isinstance(target, Optimizer) and type(target).load_state_dict is Optimizer.load_state_dict:
        problem = _optimizer_problem(target, saved)
    else:
        return False

    if problem:
        raise misfit(name, target, problem)
    return True


def misfit(name: str, target: Any, problem: str) -> CheckpointError:
    """Return the error for a saved object `name` that does not fit `target` because of `problem`."""
    return CheckpointError(
        f"The checkpoint's {name} does not fit this {type(target).__name__}: {problem}. Nothing was loaded.",
        hint=_HINT,
    )


def undo_for(target: Any) -> Callable[[], None]:
    """Return a function that restores the present state of `target`."""
    before = mapped(
        target.state_dict(), lambda t: t.clone() if is_sharded(t) else t.detach().to("cpu", copy=True)
    )

    def undo() -> None:
        if isinstance(target, Optimizer):
            load_optimizer(target, before)
        else:
            target.load_state_dict(before)

    return undo


def _loads_plainly(model: nn.Module) -> bool:
    """Return whether no hook and no overridden method changes how torch loads the model."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return False
    return not any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not _is_from_torch(type(module)._load_from_state_dict)
        for module in model.modules()
    )


def _is_from_torch(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.")


def _module_problem(present: Mapping[str, Any], saved: Any) -> tuple[str, str]:
    """Return the tensors that can't be loaded, and the keys that only one side has, as texts."""
    if not isinstance(saved, Mapping):
        return f"the checkpoint holds a {type(saved).__name__} under this name", ""

    missing = [key for key in present if key not in saved]
    unexpected = [str(key) for key in saved if key not in present]
    keys = [
        _listed(missing, "key missing from the checkpoint", "keys missing from the checkpoint"),
        _listed(unexpected, "key that this model does not have", "keys that this model does not have"),
    ]

    other_shapes = [
        f"{key} is {_shape(saved[key])} in the checkpoint, {_shape(present[key])} here"
        for key in present
        if key in saved and _shape(present[key]) != _shape(saved[key])
    ]
    shapes = _listed(other_shapes, "tensor of another shape", "tensors of another shape")
    return shapes, "; ".join(filter(None, keys))


def _listed(items: Sequence[str], singular: str, plural: str) -> str:
    """Return the number of items and the first of them; empty without items."""
    if not items:
        return ""
    noun = singular if len(items) == 1 else plural
    return f"{len(items)} {noun} ({first_items(items, _SHOWN, rest=', ...')})"


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return "x".join(map(str, value.shape)) or "a scalar"


def _optimizer_problem(optimizer: Optimizer, saved: Any) -> str:
    """Return how the parameter groups of an optimizer differ from the saved groups; empty if they don't."""
    try:
        saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    except (TypeError, KeyError, IndexError):
        return "the checkpoint holds no optimizer's state under this name"

    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes == sizes:
        return ""
    return f"{_groups(saved_sizes)} in the checkpoint, {_groups(sizes)} here"


def _groups(sizes: Sequence[int]) -> str:
    return f"{sum(sizes)} parameters in {len(sizes)} group{'s' if len(sizes) != 1 else ''}"
