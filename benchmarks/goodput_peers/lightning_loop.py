"""The script under Lightning's Trainer: a checkpoint every save interval, requeued by Lightning on SIGUSR2.

Arguments: folder, steps, save_every, step_s. Lightning resumes from the state that it saved on SIGUSR2, or
else from the last checkpoint. `save_on_exception` saves when Lightning ends the training after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from goodput_training import BATCH, Marks, Net, Samples
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2])
SAVE_EVERY = int(sys.argv[3])
STEP_S = float(sys.argv[4])


class Module(L.LightningModule):
    """The training of all ways, for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(STEP_S)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all ways."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Marker(L.Callback):
    """The marks as a callback of Lightning."""

    def __init__(self) -> None:
        self.marks = Marks(str(FOLDER))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Mark the start of a rank."""
        self.marks.begin(trainer.global_rank)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Mark a completed step."""
        self.marks.step(trainer.global_rank, trainer.global_step)


def main() -> None:
    """Train to the last step, from the newest saved state."""
    L.seed_everything(0)
    saves = ModelCheckpoint(
        FOLDER / "checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True, save_on_exception=True
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=int(os.environ["SLURM_NNODES"]),
        max_steps=STEPS,
        callbacks=[saves, Marker()],
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)],
        default_root_dir=FOLDER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    data = Samples(STEPS * BATCH * trainer.world_size)
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH, shuffle=True), ckpt_path="last")
    if trainer.global_step == STEPS:
        (FOLDER / "finished").touch()


main()
