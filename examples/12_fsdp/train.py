"""Train a model in shards, on two processes of this machine: python train.py"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slurmddp import Distributon


class Residual(nn.Module):
    """A residual block; the ranks gather each block of the model's Sequential as one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(self.widen(x).relu())
        return y


def build_model(width: int = 64) -> nn.Module:
    blocks = nn.Sequential(*(Residual(width) for _ in range(4)))
    return nn.Sequential(nn.Linear(16, width), blocks, nn.Linear(width, 4))


def batch(step: int, d: Distributon) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of 64 samples. Their class is the quarter of the input with the largest sum."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 16, generator=generator)[d.rank :: d.world_size].to(d.device)
    return x, x.view(-1, 4, 4).sum(dim=2).argmax(dim=1)


def megabytes(tensors: list[torch.Tensor]) -> float:
    """Return the size of this rank's shards of the tensors."""
    size = 0
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        size += tensor.nbytes
    return size / 1e6


def train(d: Distributon, steps: int) -> None:
    """Train up to a step; resume from the newest checkpoint in `checkpoints`, if there is one."""
    model = d.setup_model(build_model())
    optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    completed = d.load(model=model, optimizer=optimizer) or 0
    for step in range(completed + 1, steps + 1):
        x, y = batch(step, d)
        loss = cross_entropy(model(x), y)
        d.backward(loss)
        d.clip_gradients(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % 50 == 0:
            mean = d.all_reduce(loss.detach())
            d.print(f"step {step}: loss {mean:.3f}")
            d.save(step, model=model, optimizer=optimizer, wait=False)

    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    sizes = [megabytes(list(model.parameters())), megabytes(moments)]
    for rank, (weights, state) in enumerate(d.all_gather(sizes)):
        d.print(f"rank {rank} holds {weights:.2f} MB of weights, {state:.2f} MB of optimizer state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp", help="ddp: a whole replica on each rank")
    options = parser.parse_args()
    Distributon(options.ranks, strategy=options.strategy, seed=0).launch(train, options.steps)


if __name__ == "__main__":
    main()
