"""Train by Lightning's Trainer, with a callback that saves checkpoints."""

import os

import lightning as L
import progress
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A linear model with one weight."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_start(self) -> None:
        """Store the step at which the training begins."""
        self.first = self.global_step

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        progress.pace()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the weight."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


file = progress.FOLDER / "last.ckpt"
step = torch.load(file, weights_only=False)["global_step"] if file.exists() else 0
devices = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = L.Trainer(
    accelerator="cpu",
    devices=devices,
    num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
    strategy="ddp",
    max_steps=progress.last_step(step),
    callbacks=[ModelCheckpoint(dirpath=progress.FOLDER, save_last=True, every_n_train_steps=2)],
    logger=False,
    enable_progress_bar=False,
)
model = Model()
data = DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=2)
trainer.fit(model, data, ckpt_path="last")
progress.record(trainer.global_rank, trainer.local_rank, trainer.world_size, model.first, trainer.global_step)
