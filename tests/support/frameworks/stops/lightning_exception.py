"""Train by Lightning's Trainer, which saves in `on_exception` after Lightning's SIGTERM handler has run."""

import os

import lightning as L
import steps
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A linear model with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """Record a step that has ended."""
        steps.taken(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the weight."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


checkpoints = sorted(steps.FOLDER.glob("*.ckpt"))
first = torch.load(checkpoints[-1], weights_only=False)["global_step"] if checkpoints else 0
devices = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = L.Trainer(
    accelerator="cpu",
    devices=devices,
    num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
    strategy="ddp",
    max_steps=steps.last_step(first),
    callbacks=[ModelCheckpoint(steps.FOLDER, save_on_exception=True, every_n_epochs=10_000)],
    logger=False,
    enable_progress_bar=False,
    use_distributed_sampler=False,
)
data = DataLoader(TensorDataset(torch.ones(100_000, 1)), batch_size=1)
trainer.fit(Model(), data, ckpt_path=str(checkpoints[-1]) if checkpoints else None)
