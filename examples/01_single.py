"""Plain PyTorch in one process, without slurmddp, to compare with 02_distributon.py.

python examples/01_single.py
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def spirals(count: int) -> TensorDataset:
    """Return points on two spirals and the number of the spiral that each lies on."""
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
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(spirals(2000), batch_size=50, shuffle=True, drop_last=True)

    for epoch in range(options.epochs):
        for points, labels in loader:
            loss = cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss:.4f}")

    if options.weights:
        torch.save(model.state_dict(), options.weights)


if __name__ == "__main__":
    main()
