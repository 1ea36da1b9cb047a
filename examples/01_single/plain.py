"""Train as train.py does, in plain PyTorch, for comparison: python plain.py"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


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


def accuracy(model: torch.nn.Module) -> float:
    """Return the share of 1000 held-out points whose spiral the model predicts."""
    points, labels = spirals(1000, seed=2).tensors
    with torch.no_grad():
        predicted = model(points).argmax(dim=1)
    return (predicted == labels).float().mean().item()


def train(epochs: int) -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    data = spirals(2000, seed=1)
    loader = DataLoader(data, batch_size=50, shuffle=True)

    for epoch in range(epochs):
        for points, labels in loader:
            loss = cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        print(f"epoch {epoch}: {accuracy(model):.1%} of the held-out points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    train(options.epochs)


if __name__ == "__main__":
    main()
