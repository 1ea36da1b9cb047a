"""Fit a curve with a Lightning Trainer that resumes from its own last.ckpt, without code of slurmddp.

python fit.py
slurmddp run -n 2 fit.py --devices 2 --folder '{run_dir}/lightning'
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Curve(L.LightningModule):
    """A network with one hidden layer that fits a function of one variable."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = mse_loss(self.network(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {loss:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--devices", type=int, default=1, help="ranks on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--folder", default="lightning", help="for last.ckpt")
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    x = torch.linspace(-1, 1, 512)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(dirpath=options.folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Curve(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
