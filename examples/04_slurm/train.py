"""Train on SLURM: slurmddp run +cluster=mine nodes=2 train.py"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from slurmddp import Distributon


def spirals(count: int, seed: int) -> TensorDataset:
    """Return points on two spirals; the label of a point is the number of its spiral."""
    generator = torch.Generator().manual_seed(seed)
    turn = 3 * torch.pi * torch.rand(count, generator=generator).sqrt()
    label = torch.arange(count) % 2

    angle = turn + label * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 10
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def build_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))


def accuracy(model: torch.nn.Module, device: torch.device) -> float:
    """Return the share of 1000 held-out points whose spiral the model predicts."""
    points, labels = (tensor.to(device) for tensor in spirals(1000, seed=2).tensors)
    with torch.no_grad():
        predicted = model(points).argmax(dim=1)
    return (predicted == labels).float().mean().item()


def train(d: Distributon, epochs: int) -> None:
    """Train for a number of epochs; resume from the newest checkpoint in `checkpoints`, if there is one."""
    model = d.setup_model(build_model())
    optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    data = spirals(2000, seed=1)
    loader = d.setup_dataloader(DataLoader(data, batch_size=50 // d.world_size, shuffle=True))

    step = d.load(model=model, optimizer=optimizer) or 0
    for epoch in range(loader.epoch, epochs):
        for points, labels in loader:
            loss = cross_entropy(model(points), labels)
            d.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if d.should_stop():
                d.save(step, model=model, optimizer=optimizer)
                d.stop()

        d.save(step, model=model, optimizer=optimizer)
        d.print(f"epoch {epoch}: {accuracy(model, d.device):.1%} of the held-out points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    Distributon(seed=0).launch(train, options.epochs)


if __name__ == "__main__":
    main()
