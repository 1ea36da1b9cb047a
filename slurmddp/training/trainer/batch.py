"""Call the model on a batch of any form in docs/guides/data.md, and check the loss of its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slurmddp.errors import ConfigError

IGNORED = -100
"""The class number of targets that don't count, such as padding: torch's and Hugging Face's default."""


def forward(model: nn.Module, batch: Any, bare_model: nn.Module | None = None) -> tuple[Any, Any]:
    """Call `model` on the inputs of a batch.

    Args:
        model: the module to call.
        batch: a pair (inputs, targets), or a dict with the arguments of the model by name. Inputs that are a
            dict, a tuple or a list are several arguments of the model; other inputs are its only argument.
        bare_model: the module inside `model`, if `model` is a wrapper. Its signature is used in errors.

    Returns:
        The output of the model, and the targets. If the batch is a dict, the targets are the whole dict.

    Raises:
        ConfigError: the batch has another form, or the model does not take these arguments.
    """
    inputs, targets = _parts(batch)
    args, kwargs = _arguments(inputs)
    try:
        return model(*args, **kwargs), targets
    except TypeError as error:
        problem = _misfit(model if bare_model is None else bare_model, args, kwargs)
        if problem is None:
            raise

        raise ConfigError(
            f"The model can't be called with a batch of the data: {problem}.",
            hint="Change the parameters of the model's forward, or what the data returns: see "
            "docs/guides/data.md.",
        ) from error


def loss_of_output(outputs: Any, targets: Any) -> torch.Tensor:
    """Return the loss that the model has computed: `outputs.loss` or `outputs["loss"]`, a scalar.

    Raises:
        ConfigError: the outputs hold no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())

    raise ConfigError(
        f"`loss` is null, but the model's output is of type {type(outputs).__name__} and holds no loss.",
        hint="Name a loss function, such as loss._target_=torch.nn.functional.mse_loss, or let the model "
        "return an object with one number as `.loss`, or a dict with it as 'loss'.",
    )


def has_ignored_targets(batch: Any) -> bool:
    """Decide whether the batch is a dict in whose "labels" some entries are -100, which losses ignore."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and bool((labels == IGNORED).any())


def loss_of_batch(value: Any, name: str) -> torch.Tensor | tuple[torch.Tensor, Any]:
    """Check the loss of a batch, and return it as a scalar, or as a pair of a scalar sum and a count.

    Args:
        value: the result of the loss function.
        name: the name of the loss function, for errors.

    Raises:
        ConfigError: `value` is neither a scalar tensor nor such a pair.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    loss = value[0] if is_pair else value

    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        scalar = loss.reshape(())
        return (scalar, value[1]) if is_pair else scalar
    if isinstance(loss, torch.Tensor) and not is_pair:
        raise ConfigError(
            f"The loss function {name} returned a tensor of shape {tuple(loss.shape)}, "
            "but it must be a scalar.",
            hint="Return the mean over the batch: .mean(), or reduction='mean' of a loss of torch.",
        )

    returned = f"a pair whose first part is {kind_of(loss)}" if is_pair else f"a {type(value).__name__}"
    raise ConfigError(
        f"The loss function {name} returned {returned}, but it must return the loss of a batch.",
        hint="Return the mean over the batch as a tensor with one number, or a pair (sum, count).",
    )


def kind_of(value: Any) -> str:
    """Return the dtype and the shape of a tensor, or the type of another value, for an error."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return batch, batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]

    form = f"of type {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        form = f"of {len(batch)} parts"
    raise ConfigError(
        f"The data gives batches {form}; the trainer needs pairs (inputs, targets), or dicts with the "
        "arguments of the model.",
        hint="Return pairs or dicts from the data set, give it a method collate(samples), or name your own "
        "training function in program._target_.",
    )


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    # Accept lists, too, because torch's collation makes lists of tuples. But a named tuple, such as a
    # PackedSequence, is a single argument.
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def _misfit(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why the model's `forward` does not take these arguments, as a text.

    None if it takes them, or if its signature is unknown.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None

    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = f" named {', '.join(kwargs)}" if kwargs else ""
        inputs = f"{len(args) or len(kwargs)} inputs{names}"
        return f"it was given {inputs}, but {type(model).__name__}.forward{signature} does not fit: {error}"

    return None
