"""Check that a saved state fits an object before a load, so that no object is loaded in part."""

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
"""Number of keys of each kind that a message names; between models of different depth hundreds differ."""
_HINT = (
    "The checkpoint was written with another model or configuration. Use its model and configuration again, "
    "or save to another folder: change name= of the run, or root= in a script."
)


def check(name: str, target: Any, saved: Any, ignored: list[str] | None = None) -> bool:
    """Check that `saved` fits `target`, and return whether a load of it is certain to succeed.

    Args:
        name: the name of the object in the state.
        target: the object that will load the state. If it is neither a module nor an optimizer, or has its
            own `load_state_dict` or load hooks, nothing is checked and the result is False.
        saved: the state to load.
        ignored: a list to which a text is added that names the keys of a module that only `target` or only
            `saved` has. None: such keys are an error.

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
    """Copy the state of `target`, and return a function that loads this copy back into `target`."""
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
    """Return whether torch loads the model without load hooks and without overridden load methods."""
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
    """Compare a module's state_dict with a saved state.

    Args:
        present: the state_dict of the module.
        saved: the state from the checkpoint.

    Returns:
        Two texts, each empty without a problem: the tensors of another shape, and the keys that only one of
        the two has.
    """
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
    """Return a text with the number of items and the first three (_SHOWN) of them; empty without items."""
    if not items:
        return ""
    noun = singular if len(items) == 1 else plural
    return f"{len(items)} {noun} ({first_items(items, _SHOWN, rest=', ...')})"


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return "x".join(map(str, value.shape)) or "a scalar"


def _optimizer_problem(optimizer: Optimizer, saved: Any) -> str:
    """Describe how the saved parameter groups differ in size from the optimizer's; empty if they do not."""
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
