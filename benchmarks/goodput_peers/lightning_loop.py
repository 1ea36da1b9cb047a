"""The script under Lightning's Trainer: a checkpoint every save interval, requeued by Lightning on SIGUSR2.

Arguments: folder, steps, save_every, step_s. A state that Lightning saved on SIGUSR2 goes before the last
checkpoint. `save_on_exception` saves when Lightning ends the training after SIGTERM.
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

FOLDER, STEPS, SAVE_EVERY, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(STEP_S)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Marker(L.Callback):
    def __init__(self) -> None:
        self.marks = Marks(str(FOLDER))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.marks.begin(trainer.global_rank)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.marks.step(trainer.global_rank, trainer.global_step)


def main() -> None:
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
