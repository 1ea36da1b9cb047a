"""Evaluates loss and metrics on held-out data, without side effects: each sample once, on any ranks."""

from __future__ import annotations

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
    """Return the means over the held-out samples, or None if a stop interrupted the evaluation.

    The loss is called `eval_loss`, each metric as in the configuration. With `train.ema` the averaged weights
    are evaluated. A sharded model is evaluated to the end: a stop waits, because each batch needs all ranks.

    All ranks call it and get the same values. All ranks use the buffers and the averaged weights of rank 0,
    as checkpoints do. Weights, the mode of each layer and random states stay unchanged.
    """
    if components.heldout is None:
        return None
    distributon.heartbeat("evaluating")
    model = components.evaluated_model
    collectives.share(model.buffers())
    if components.ema is not None:  # Replicas that train apart have averages of their own.
        collectives.share(model.parameters())
    randomness, was_training = rng.capture(), model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with uncompiled(components.settings.compile):
            loader, own = _share(distributon, components, components.heldout)
            sums, complete = _sum(distributon, components, loader, own)
    finally:
        model.train(was_training)  # The model may override `train`.
        for module, mode in modes:
            module.training = mode
        rng.restore(randomness)
    found = collectives.gather((sums, complete))
    if not all(complete for _, complete in found):
        return None
    return metrics.means(sums for sums, _ in found)


def has_samples(components: Components) -> bool:
    """Tell whether there are samples to evaluate on."""
    heldout: Any = components.heldout
    return heldout is not None and len(heldout) > 0 and components.settings.eval_batches > 0


def _share(
    distributon: Distributon, components: Components, heldout: Dataset[object]
) -> tuple[DataLoader[object], int]:
    """Return a loader over this rank's part of samples that are spread evenly over the held-out data.

    The second value is the number of samples. For a sharded model, a further batch may follow them, so that
    all ranks have equally many batches.
    """
    size: int = len(heldout)  # type: ignore[arg-type]
    count = min(size, components.settings.eval_batches * components.settings.batch_size)
    own = [i * size // count for i in shard_range(count, distributon.rank, distributon.world_size)]
    samples, batch_size = len(own), components.settings.batch_size
    most = -(-count // distributon.world_size)
    if has_shards(components.evaluated_model) and -(-samples // batch_size) < -(-most // batch_size):
        own.append(0)
    options: dict[str, Any] = {"batch_size": batch_size, "generator": torch.Generator()}
    options["collate_fn"] = dataset.collate_of(heldout, components.data)
    if draws(heldout):
        return DataLoader(SeededSamples(heldout, 0), sampler=[(index,) for index in own], **options), samples
    return DataLoader(heldout, sampler=own, **options), samples


@torch.no_grad()
def _sum(
    distributon: Distributon, components: Components, loader: DataLoader[object], own: int
) -> tuple[metrics.Sums, bool]:
    """Return the sums of loss and metrics over this rank's samples, and whether no stop interrupted them."""
    measured = {"eval_loss": components.loss, **components.metrics}
    sums: metrics.Sums = {}
    is_sharded = has_shards(components.evaluated_model)
    for number, batch in enumerate(to_device(batch, distributon.device) for batch in loader):
        distributon.heartbeat("evaluating")
        if distributon.stop_requested and not is_sharded:
            return sums, False
        # `targets` may be a dict, so its length is not the number of samples.
        size = loader.batch_size or 1
        samples = min(size, own - number * size)
        # DistributedDataParallel would wait for ranks that have fewer batches.
        outputs, targets = forward(components.evaluated_model, batch)
        for name, measure in measured.items() if samples > 0 else ():
            metrics.add(sums, name, measure(outputs, targets), samples)
    return sums, True
