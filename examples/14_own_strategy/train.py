"""Train by majority vote on processes of this machine: python train.py"""

import argparse

import torch
from majority import MajorityVote
from torch import nn
from torch.nn.functional import cross_entropy

from slurmddp import Distributon


def batch(step: int, d: Distributon) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of 96 samples. Their class is the quarter of the input with the largest sum."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(96, 16, generator=generator)[d.rank :: d.world_size].to(d.device)
    return x, x.view(-1, 4, 4).sum(dim=2).argmax(dim=1)


def train(d: Distributon, strategy: MajorityVote, steps: int) -> None:
    """Train up to a step; resume from the newest checkpoint in `checkpoints`, if there is one."""
    model = d.setup_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=2e-3))

    completed = d.load(model=model, optimizer=optimizer) or 0
    for step in range(completed + 1, steps + 1):
        x, y = batch(step, d)
        loss = cross_entropy(model(x), y)
        d.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        if step % 50 == 0:
            d.print(f"step {step}: loss {d.all_reduce(loss.detach()):.3f}")
            d.save(step, model=model, optimizer=optimizer)

    weights = nn.utils.parameters_to_vector(model.parameters())
    are_equal = all(torch.equal(replica, weights) for replica in d.all_gather(weights))
    gradient_bytes = 4 * len(weights) * len(range(completed, steps))
    d.print(f"{strategy.bytes_sent} bytes of votes instead of {gradient_bytes} bytes of gradients")
    d.print(f"replicas are {'equal' if are_equal else 'different'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()

    strategy = MajorityVote(momentum=0.9)
    Distributon(options.ranks, strategy=strategy, seed=0).launch(train, strategy, options.steps)


if __name__ == "__main__":
    main()
