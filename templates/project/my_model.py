"""The model and the data set of this project: replace them by your own."""

import math

import torch
from torch import nn
from torch.utils.data import Dataset


class Classifier(nn.Module):
    """A network that maps points (batch, 2) to logits (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(points)
        return logits


class Spirals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of interleaved spirals; a sample is (point, class), of shapes (2,) and ()."""

    deterministic = True

    def __init__(self, count: int, classes: int, first: int = 0) -> None:
        self.count = count
        self.classes = classes
        self.first = first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        place, label = divmod(self.first + index, self.classes)
        # Multiples of the golden ratio fill the interval from 0 to 1 evenly.
        radius = (place * 0.618034) % 1
        angle = 5 * radius + 2 * math.pi * label / self.classes
        point = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)])
        return point, torch.tensor(label)

    def heldout(self) -> "Spirals":
        """Return 500 samples that follow the training samples."""
        return Spirals(500, self.classes, first=self.first + self.count)
