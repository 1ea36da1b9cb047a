"""Train a small network on the 1797 handwritten digits of scikit-learn: slurmddp run train.py"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from slurmddp import Distributon


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return images, shape (n, 1, 8, 8), with their digits: for training, and held out (every fifth)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)

    held_out = torch.arange(len(labels)) % 5 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    return training, TensorDataset(images[held_out], labels[held_out])


def build_model() -> nn.Module:
    first = [nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Dropout(0.2), nn.Linear(512, 10))


@torch.no_grad()
def evaluate(d: Distributon, model: nn.Module, held_out: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy over all held-out images; each rank evaluates its part."""
    network = d.unwrap(model).eval()
    sums = torch.zeros(3, device=d.device)

    for images, labels in held_out:
        scores = network(images)
        sums[0] += cross_entropy(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)

    network.train()
    loss, correct, count = d.all_reduce(sums, "sum").tolist()
    return loss / count, correct / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    with Distributon(seed=0) as d:
        d.launch()
        model = d.setup_model(build_model())
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

        training, held_out = digits()
        loader = d.setup_dataloader(DataLoader(training, batch_size=32 // d.world_size, shuffle=True))
        tests = d.setup_dataloader(DataLoader(held_out, batch_size=64), even=False)

        step = d.load(model=model, optimizer=optimizer) or 0
        for epoch in range(loader.epoch, options.epochs):
            for images, labels in loader:
                loss = cross_entropy(model(images), labels)
                d.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1

                if step % 10 == 0:
                    d.log_metrics({"loss": d.all_reduce(loss)}, step)
                if d.should_stop():
                    d.save(step, model=model, optimizer=optimizer)
                    d.stop()

            eval_loss, accuracy = evaluate(d, model, tests)
            d.log_metrics({"eval_loss": eval_loss, "accuracy": accuracy}, step)
            d.print(f"epoch {epoch}: {accuracy:.1%} of the held-out images")
            d.save(step, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
