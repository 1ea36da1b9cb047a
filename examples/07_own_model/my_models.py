"""A model of the project, found by its import path."""

import torch
from torch import nn


class CharLSTM(nn.Module):
    """LSTM that predicts the next character: ids (batch, length) to logits (batch, length, vocab_size)."""

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        logits: torch.Tensor = self.head(hidden)
        return logits
