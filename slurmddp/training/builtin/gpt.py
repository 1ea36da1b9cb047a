"""Define a small GPT, the default model, which trains on two CPU cores.

Decoder-only transformer with pre-norm blocks (Radford et al. 2019), learned positions, GELU, and the scaled
initialisation of the layers that write into the residual stream.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from slurmddp.errors import ConfigError


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.read(x).split(width, dim=2)
        )

        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        written: torch.Tensor = self.write(mixed.transpose(1, 2).reshape(batch, length, width))
        return written


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = _Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.write = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.widen(self.mlp_norm(x)))
        mixed: torch.Tensor = x + self.dropout(self.write(hidden))
        return mixed


class GPT(nn.Module):
    """A GPT language model, which predicts the next token at each position.

    It maps token ids, shape (batch, length), int64, to logits, shape (batch, length, vocab_size). The length
    is at most `context`.

    Args:
        vocab_size: the number of different tokens.
        context: the length of the longest sequence, in tokens.
        width: the size of the residual stream; a multiple of `heads`.
        layers: the number of transformer blocks.
        heads: the number of attention heads per block.
        dropout: the probability of dropout, from 0 to below 1.
        tie_embeddings: whether input and output embedding share their weights.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(vocab_size, context, width, layers, heads, dropout)

        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([_Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)

        self.apply(_initialise)
        # Each block adds two outputs to the residual stream. Scale their initial weights down, so that the
        # variance of the stream does not grow with the number of layers.
        for name, parameter in self.named_parameters():
            if name.endswith("write.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

        if tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ConfigError(
                f"The data gives sequences of {length} tokens, and model.context is {self.context}.",
                hint=f"Set model.context={length}, or let the data give shorter sequences.",
            )

        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)

        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(
        self, ids: torch.Tensor, count: int, *, generator: torch.Generator, temperature: float = 0.8
    ) -> torch.Tensor:
        """Continue a sequence by tokens drawn from the model's predictions; call `model.eval()` before.

        Args:
            ids: shape (1, length), int64.
            count: the number of tokens to draw.
            generator: a CPU generator, the only source of randomness.
            temperature: the number by which logits are divided before the softmax; above 0.

        Returns:
            The given and the drawn tokens, shape (1, length + count), int64.
        """
        for _ in range(count):
            logits = self(ids[:, -self.context :])[:, -1].float().cpu() / temperature
            drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat([ids, drawn.to(ids.device)], dim=1)

        return ids


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def _check_sizes(vocab_size: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
    sizes = {"vocab_size": vocab_size, "context": context, "width": width, "layers": layers, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name} is {size}.", hint="Give a number above 0.")

    if width % heads:
        raise ConfigError(
            f"model.width is {width}, which is no multiple of model.heads={heads}.",
            hint="Make model.width a multiple of model.heads.",
        )

    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout is {dropout}.", hint="Give a probability from 0 to below 1.")
