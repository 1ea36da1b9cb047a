"""The loss on held-out data: every sample once, whatever the number of ranks, and no trace left behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from slurmddp.training import rng
from slurmddp.training.data.loader import to_device
from slurmddp.training.data.permutation import shard_range
from slurmddp.training.data.seeding import SeededSamples, draws
from slurmddp.training.distributon import Distributon
from slurmddp.training.process_group import collectives
from slurmddp.training.trainer.components import Components, Loss


def evaluate(distributon: Distributon, parts: Components) -> float | None:
    """Return the mean loss over the held-out samples of all ranks, or None when a stop cut it short.

    All ranks call it and get the same answer. It is that of rank 0's model, the one that a checkpoint holds:
    other ranks take over its buffers, as they do in the next training step anyway. Weights, the mode of every
    layer (one may be frozen in evaluation mode) and all random states stay as they were.
    """
    if parts.heldout is None:
        return None
    distributon.heartbeat("evaluating")
    collectives.share_buffers(parts.bare_model)
    randomness, was_training = rng.capture(), parts.bare_model.training
    modes = [(module, module.training) for module in parts.bare_model.modules()]
    parts.bare_model.eval()
    try:
        total, count, complete = _sum_losses(distributon, parts, _share(distributon, parts, parts.heldout))
    finally:
        parts.bare_model.train(was_training)  # A model may do more there than set the modes.
        for module, mode in modes:
            module.training = mode
        rng.restore(randomness)
    found = collectives.gather((total, count, complete))
    if not all(complete for _, _, complete in found):
        return None
    return sum(total for total, _, _ in found) / sum(count for _, count, _ in found)


def has_samples(parts: Components) -> bool:
    """Whether there is anything to evaluate on."""
    return parts.heldout is not None and len(parts.heldout) > 0 and parts.settings.eval_batches > 0  # type: ignore[arg-type]


def _share(distributon: Distributon, parts: Components, heldout: Dataset[object]) -> DataLoader[object]:
    """Return a loader over this rank's part of samples that lie evenly over the held-out data."""
    size: int = len(heldout)  # type: ignore[arg-type]
    count = min(size, parts.settings.eval_batches * parts.settings.batch_size)
    own = [i * size // count for i in shard_range(count, distributon.rank, distributon.world_size)]
    options: dict[str, Any] = {
        "batch_size": parts.settings.batch_size,
        "generator": torch.Generator(),
    }
    if draws(heldout):
        return DataLoader(SeededSamples(heldout, 0), sampler=[(index,) for index in own], **options)
    return DataLoader(heldout, sampler=own, **options)


@torch.no_grad()
def _sum_losses(
    distributon: Distributon, parts: Components, loader: DataLoader[object]
) -> tuple[float, int, bool]:
    """Return the sum of sample losses, their number, and whether no stop came between."""
    # The bare model: a replica that synchronises would wait for ranks that have fewer batches.
    model: nn.Module = parts.bare_model
    loss_of: Loss = parts.loss
    own: int = len(loader.sampler)  # type: ignore[arg-type]
    total, count = 0.0, 0
    for inputs, targets in (to_device(batch, distributon.device) for batch in loader):
        distributon.heartbeat("evaluating")
        if distributon.stop_requested:
            return total, count, False
        # Not the length of `targets`, which may be a dict.
        samples = min(loader.batch_size or 1, own - count)
        total += float(loss_of(model(inputs), targets)) * samples
        count += samples
    return total, count, True
