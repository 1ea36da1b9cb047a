"""A training for any launcher; with --devices 2 it starts two ranks itself."""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from slurmddp import Distributon


def spirals(count: int) -> TensorDataset:
    """Return points on two spirals; the label of a point is the number of its spiral."""
    generator = torch.Generator().manual_seed(0)
    turn = 3 * torch.pi * torch.rand(count, generator=generator).sqrt()
    label = torch.arange(count) % 2
    angle = turn + label * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 10
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def build_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--weights", help="file for the trained weights")
    parser.add_argument("--devices", type=int, help="processes to start on this machine")
    parser.add_argument("--checkpoints", help="folder for checkpoints")
    options = parser.parse_args()

    distributon = Distributon(options.devices or "auto", seed=0)
    distributon.launch()
    model = distributon.setup_model(build_model())
    optimizer = distributon.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = distributon.setup_dataloader(
        DataLoader(spirals(2000), batch_size=50, shuffle=True, drop_last=True)
    )
    step = 0
    if options.checkpoints:
        step = distributon.load(root=options.checkpoints, model=model, optimizer=optimizer) or 0

    for epoch in range(loader.epoch, options.epochs):
        loss = None  # stays None after a stop behind the last batch of this epoch
        for points, labels in loader:
            loss = cross_entropy(model(points), labels)
            distributon.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if options.checkpoints and distributon.should_stop():
                distributon.save(step, root=options.checkpoints, model=model, optimizer=optimizer)
                distributon.stop()

        if loss is not None:
            distributon.print(f"epoch {epoch}: loss {distributon.all_reduce(loss):.4f}")
        if options.checkpoints:
            distributon.save(step, root=options.checkpoints, model=model, optimizer=optimizer)

    if options.weights and distributon.is_global_zero:
        torch.save(distributon.unwrap(model).state_dict(), options.weights)


if __name__ == "__main__":
    main()
