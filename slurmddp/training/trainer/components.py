"""Build the components of a training from the configuration: data, model, loss, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from slurmddp.checkpoint.state.shards import has_shards
from slurmddp.errors import ConfigError
from slurmddp.settings.check_values import read_section
from slurmddp.settings.schema import TrainSettings
from slurmddp.settings.spec import GlobalBatch
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.distributon import Distributon
from slurmddp.training.instantiate import instantiate, is_called_later
from slurmddp.training.trainer import dataset
from slurmddp.training.trainer.batch import loss_of_batch, loss_of_output
from slurmddp.training.trainer.compilation import compile_in_place
from slurmddp.training.trainer.ema import AverageOfWeights
from slurmddp.training.trainer.metrics import Metric
from slurmddp.training.trainer.sparse import check_sparse

Loss = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Any]]
"""A loss function of (outputs, targets). It returns the mean over the batch, or a pair (sum, count)."""


def is_due(every: int, step: int) -> bool:
    """Return whether `step` is a multiple of `every`; False if `every` is 0."""
    return every > 0 and step % every == 0


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of one training, in the order of their construction."""

    settings: TrainSettings
    data: Any
    heldout: Dataset[Any] | None
    loader: DistributedLoader
    bare_model: nn.Module
    model: nn.Module
    loss: Loss
    metrics: Mapping[str, Metric]
    optimizer: Optimizer
    scheduler: LRScheduler | None
    ema: AverageOfWeights | None = None

    @property
    def evaluated_model(self) -> nn.Module:
        """The model to evaluate: the copy with the averaged weights if `train.ema` is set, else the model."""
        return self.bare_model if self.ema is None else self.ema.model

    @property
    def unit(self) -> str:
        return "tokens" if hasattr(self.data, "tokens_per_sample") else "samples"

    @property
    def units_per_sample(self) -> int:
        return int(getattr(self.data, "tokens_per_sample", 1))

    def units_per_step(self, world_size: int) -> int:
        """Return the number of samples, or of tokens, that all ranks together train per optimizer step."""
        samples = (self.loader.batch_size or 1) * self.loader.accumulate * world_size
        return samples * self.units_per_sample

    @property
    def saved_objects(self) -> dict[str, Any]:
        """The components that checkpoints store, by name."""
        named: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema and self.ema.model,
        }
        return {name: value for name, value in named.items() if value is not None}

    def batches(self) -> Iterator[Any]:
        """Yield the batches of one epoch after the other, without an end.

        Raises:
            ConfigError: an epoch has no batch.
        """
        # One epoch may be empty: the rest of an epoch after a resume at its end. Two in a row mean that the
        # data has no whole batch.
        empty_epochs = 0
        while empty_epochs < 2:
            empty_epochs += 1
            for batch in self.loader:
                empty_epochs = 0
                yield batch

        raise ConfigError(
            f"data is a {type(self.data).__name__} whose epoch has no whole batch for this rank.",
            hint="Use a smaller train.batch_size, fewer ranks or loader workers, or more data.",
        )


def build_components(distributon: Distributon, config: Mapping[str, Any]) -> Components:
    """Build all components from the run's configuration. They are equal on all ranks, except for the data.

    Raises:
        ConfigError: a component can't be built, or does not fit the others.
    """
    settings = read_section(config["train"], TrainSettings, "train.")
    data = instantiate(config["data"], _key_="data")
    distributon._session.startup.lap("data")

    batch_size = settings.batch_size
    accumulate = settings.accumulate
    if settings.global_batch is not None:
        batch_size, accumulate = GlobalBatch(settings.global_batch).share(distributon.world_size, batch_size)
    readers = distributon.world_size * max(1, settings.workers)
    loader = DataLoader(
        dataset.checked(data, readers),
        sampler=dataset.sampler_for(data),
        batch_size=batch_size,
        collate_fn=dataset.collate_of(data),
        drop_last=True,
        num_workers=settings.workers,
        pin_memory=distributon.device.type == "cuda",
        persistent_workers=settings.workers > 0,
    )

    bare_model = instantiate(config["model"], _key_="model")
    if not isinstance(bare_model, nn.Module):
        raise ConfigError(
            f"model._target_ {config['model'].get('_target_')!r} gives a {type(bare_model).__name__}.",
            hint="Name a torch.nn.Module, or a function that returns one.",
        )

    model = distributon.setup_model(bare_model)
    if settings.ema is not None and has_shards(model):
        raise ConfigError(
            f"train.ema={settings.ema} needs a copy of the model, and torch can't copy a sharded model.",
            hint="Choose strategy=ddp, or leave train.ema out.",
        )
    ema = None if settings.ema is None else AverageOfWeights(bare_model, settings.ema)
    if settings.compile:
        compile_in_place(bare_model, distributon.device)

    bare_optimizer = instantiate(config["optimizer"], bare_model.parameters(), _key_="optimizer")
    check_sparse(bare_model, bare_optimizer)
    optimizer = distributon.setup_optimizer(bare_optimizer)

    return Components(
        settings=settings,
        data=data,
        heldout=_heldout(data, settings),
        loader=distributon.setup_dataloader(loader, accumulate=accumulate, keep_global_batch=True),
        bare_model=bare_model,
        model=model,
        loss=_checked_loss(config["loss"]),
        metrics={
            name: _build_measure(metric, f"metrics.{name}")
            for name, metric in (config.get("metrics") or {}).items()
        },
        optimizer=optimizer,
        scheduler=_build_scheduler(config.get("scheduler"), optimizer),
        ema=ema,
    )


def _heldout(data: Any, settings: TrainSettings) -> Dataset[Any] | None:
    heldout: Any = dataset.heldout_of(data)
    if settings.best is not None and not (heldout and settings.eval_batches):
        raise ConfigError(
            f"train.best={settings.best} needs evaluations, and there is no held-out data.",
            hint="Give the data set a method heldout(), and set train.eval_batches=1 or more.",
        )
    return heldout  # type: ignore[no-any-return]


def build_loss(config: Mapping[str, Any] | None) -> Loss:
    """Return the loss function that `config` describes; None: the function `loss_of_output`."""
    if config is None:
        return loss_of_output
    return _build_measure(config, "loss")


def _checked_loss(config: Mapping[str, Any] | None) -> Loss:
    """Return the result of `build_loss`, wrapped so that each call checks its result by `loss_of_batch`."""
    measure = build_loss(config)
    # `loss_of_output` needs no wrapper, because it checks its result itself.
    if config is None:
        return measure

    name = str(config["_target_"])

    def loss(outputs: Any, targets: Any) -> Any:
        return loss_of_batch(measure(outputs, targets), name)

    return loss


def _build_measure(config: Mapping[str, Any], key: str) -> Callable[[Any, Any], Any]:
    """Return the function of (outputs, targets) that `config` describes.

    This is `_target_` itself, with its arguments in `config`, if it takes two more positional arguments.
    Otherwise it is the result of calling `_target_`.

    Raises:
        ConfigError: the result can't be called.
    """
    if is_called_later(config, 2, _key_=key):
        config = {**config, "_partial_": True}

    measure = instantiate(config, _key_=key)
    if not callable(measure):
        raise ConfigError(
            f"{key}._target_ {config['_target_']!r} gives a {type(measure).__name__}, which can't be called.",
            hint="Name a function of (outputs, targets), or a class whose objects can be called with them.",
        )
    return measure  # type: ignore[no-any-return]


def _build_scheduler(config: Mapping[str, Any] | None, optimizer: Optimizer) -> LRScheduler | None:
    if not config:
        return None

    scheduler = instantiate(config, optimizer, _key_="scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}, but the learning rate must depend on the step only.",
            hint="Use a function of the step, such as slurmddp.training.builtin.schedules.cosine.",
        )
    return scheduler  # type: ignore[no-any-return]
