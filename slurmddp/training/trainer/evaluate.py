"""Evaluate loss and metrics on held-out data, without side effects; each sample counts once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from slurmddp.checkpoint.state.shards import has_shards
from slurmddp.collectives import values as collectives
from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import to_device
from slurmddp.training.data.sampler import shard_range
from slurmddp.training.data.seeding import SeededSamples, draws
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer import dataset, metrics
from slurmddp.training.trainer.batch import forward
from slurmddp.training.trainer.compilation import uncompiled
from slurmddp.training.trainer.components import Components


def evaluate(distributon: Distributon, components: Components) -> dict[str, float] | None:
    """Evaluate the model on the held-out samples. All ranks call it.

    With `train.ema` the averaged weights are evaluated. All ranks first take the buffers and averaged weights
    of rank 0, which checkpoints contain too. Weights, the training mode of each layer and random states stay
    unchanged. A stop interrupts the evaluation, except for a sharded model, whose batches need all ranks.

    Returns:
        The means over the samples by name, the same on all ranks: `eval_loss`, and the metrics with their
        names in the configuration. None without held-out data, or if a stop interrupted the evaluation.
    """
    if components.heldout is None:
        return None

    distributon.heartbeat("evaluating")
    model = components.evaluated_model
    collectives.share(model.buffers())
    # The averages differ between ranks if the strategy does not average gradients in each step.
    if components.ema is not None:
        collectives.share(model.parameters())

    random_states = rng.capture()
    was_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with uncompiled(components.settings.compile):
            loader, samples = _shard(distributon, components, components.heldout)
            sums, complete = _sum(distributon, components, loader, samples)
    finally:
        # Call the model's own `train` first, because the model may override it.
        model.train(was_training)
        for module, mode in modes:
            module.training = mode
        rng.restore(random_states)

    gathered = collectives.gather((sums, complete))
    if not all(complete for _, complete in gathered):
        return None
    return metrics.means(sums for sums, _ in gathered)


def has_samples(components: Components) -> bool:
    """Decide whether there are held-out samples and `train.eval_batches` is above 0."""
    heldout: Any = components.heldout
    return heldout is not None and len(heldout) > 0 and components.settings.eval_batches > 0


def _shard(
    distributon: Distributon, components: Components, heldout: Dataset[object]
) -> tuple[DataLoader[object], int]:
    """Return a loader over this rank's held-out samples, and the number of these samples.

    The samples of all ranks together are spread evenly over the data. A sharded model needs equally many
    batches on all ranks. For it, the loader may yield one more sample, which must not be counted.
    """
    size: int = len(heldout)  # type: ignore[arg-type]
    batch_size = components.settings.batch_size
    count = min(size, components.settings.eval_batches * batch_size)
    indices = [i * size // count for i in shard_range(count, distributon.rank, distributon.world_size)]

    samples = len(indices)
    batches = math.ceil(samples / batch_size)
    max_samples = math.ceil(count / distributon.world_size)
    if has_shards(components.evaluated_model) and batches < math.ceil(max_samples / batch_size):
        indices.append(0)

    options: dict[str, Any] = {
        "batch_size": batch_size,
        "generator": torch.Generator(),
        "collate_fn": dataset.collate_of(heldout, components.data),
    }
    if draws(heldout):
        seeded = SeededSamples(heldout, 0)
        return DataLoader(seeded, sampler=[(index,) for index in indices], **options), samples
    return DataLoader(heldout, sampler=indices, **options), samples


@torch.no_grad()
def _sum(
    distributon: Distributon, components: Components, loader: DataLoader[object], samples: int
) -> tuple[metrics.Sums, bool]:
    """Return the sums of loss and metrics over this rank's samples.

    The second value is False if a stop interrupted the evaluation.
    """
    measured = {"eval_loss": components.loss, **components.metrics}
    sums: metrics.Sums = {}
    is_sharded = has_shards(components.evaluated_model)
    for number, batch in enumerate(to_device(batch, distributon.device) for batch in loader):
        distributon.heartbeat("evaluating")
        if distributon.stop_requested and not is_sharded:
            return sums, False

        # Compute the number of samples: `targets` may be a dict, whose length is another number.
        batch_size = loader.batch_size or 1
        samples_of_batch = min(batch_size, samples - number * batch_size)
        # Call the model without its DistributedDataParallel wrapper, whose forward pass may wait for ranks
        # that have fewer batches.
        outputs, targets = forward(components.evaluated_model, batch)
        if samples_of_batch <= 0:
            continue
        for name, measure in measured.items():
            metrics.add(sums, name, measure(outputs, targets), samples_of_batch)

    return sums, True
