"""Programs of Lightning, which finds its place by the variables that srun sets, and checks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FABRIC = """
import json, sys, torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[2]), num_nodes=int(sys.argv[3]), strategy="ddp")
fabric.launch()
total = fabric.all_reduce(torch.tensor([1.0 + fabric.global_rank]), reduce_op="sum").item()
place = [fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size, total]
open(f"{sys.argv[1]}/place-{fabric.global_rank}", "w").write(json.dumps(place))
"""
# The first attempt takes its time; each later one ends three epochs after the checkpoint that it found.
TRAINER = """
import json, os, sys, time, torch
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

folder, devices, nodes, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
attempt = int(os.environ["SLURMDDP_ATTEMPT"])

class Model(L.LightningModule):
    first = None

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_epoch_start(self):
        self.first = self.current_epoch if self.first is None else self.first

    def training_step(self, batch, index):
        time.sleep(0 if attempt or epochs < 9 else 0.1)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if attempt:
    epochs = torch.load(f"{folder}/lightning/last.ckpt", weights_only=False)["epoch"] + 4
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 1)), batch_size=2)
saved = ModelCheckpoint(dirpath=f"{folder}/lightning", save_last=True)
trainer = L.Trainer(
    accelerator="cpu", devices=devices, num_nodes=nodes, strategy="ddp", max_epochs=epochs,
    callbacks=[saved], logger=False, enable_progress_bar=False, default_root_dir=folder,
)
model = Model()
trainer.fit(model, data, ckpt_path="last")
place = [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size]
open(f"{folder}/place-{trainer.global_rank}", "w").write(json.dumps(place))
open(f"{folder}/epochs-{attempt}-{trainer.global_rank}", "w").write(f"{model.first} {trainer.current_epoch}")
"""


def write_programs(folder: Path) -> None:
    (folder / "fabric.py").write_text(FABRIC)
    (folder / "trainer.py").write_text(TRAINER)


def settings(program: str, nodes: int, epochs: int = 2) -> list[str]:
    """Return the settings that run a program on two ranks of each node."""
    arguments = json.dumps(["{run_dir}", "2", str(nodes), str(epochs)])
    return [f"program.script={program}.py", f"program.args={arguments}", f"nodes={nodes}", "ranks_per_node=2"]


def places(run: Path) -> list[list[Any]]:
    """Return what the ranks of a run have found, in the order of the ranks."""
    return [json.loads(path.read_text())[:4] for path in sorted(run.glob("place-*"))]


FOUR = [[rank, rank % 2, rank // 2, 4] for rank in range(4)]
"""Global rank, local rank, node rank and world size on two nodes of two ranks."""
