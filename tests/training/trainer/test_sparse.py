"""Sparse gradients: their norm and clipping, and the optimizers that can't train them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
from slurmddp.training.checkpointing.finite import gradient_norm
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.sparse import check_sparse


class Tagger(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=sparse)
        self.last = nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tags: torch.Tensor = self.last(self.embedding(tokens))
        return tags


def gradients_of(sparse: bool) -> list[nn.Parameter]:
    """Return parameters with gradients; a token occurs twice."""
    torch.manual_seed(0)
    model = Tagger(sparse).double()
    model(torch.tensor([1, 2, 1, 4])).square().sum().backward()
    return list(model.parameters())


@pytest.mark.parametrize("clip_norm", [None, 0.1, 100.0])
def test_sparse_gradients_are_clipped_as_dense_ones(clip_norm: float | None) -> None:
    dense, sparse = gradients_of(False), gradients_of(True)
    torch.testing.assert_close(gradient_norm(sparse, clip_norm), gradient_norm(dense, clip_norm))
    assert sparse[0].grad is not None and sparse[0].grad.is_sparse
    for one, other in zip(sparse, dense, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.to_dense(), other.grad)


def test_a_loop_clips_sparse_gradients(alone: Distributon) -> None:
    model = alone.setup_model(nn.Embedding(5, 3, sparse=True))
    alone.backward(model(torch.tensor([1, 1, 2])).sum())
    assert alone.clip_gradients(model, 1.0).item() == pytest.approx((3 * 4 + 3) ** 0.5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (torch.optim.SGD, {"lr": 0.1}, None),
        (torch.optim.Adagrad, {}, None),
        (torch.optim.SparseAdam, {}, None),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "keeps a sparse state, such as a momentum"),
        (torch.optim.AdamW, {}, "does not support sparse gradients"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "weight_decay"),
    ],
)
def test_an_optimizer_that_can_not_train_sparse_gradients_is_refused(
    kind: Any, settings: dict[str, Any], problem: str | None
) -> None:
    check_sparse(Tagger(sparse=False), kind(Tagger(sparse=False).parameters(), **settings))
    model = Tagger(sparse=True)
    optimizer = kind(model.parameters(), **settings)
    if problem is None:
        check_sparse(model, optimizer)
    else:
        with pytest.raises(ConfigError, match=f"{kind.__name__} can't train.*Tagger.*{problem}") as refused:
            check_sparse(model, optimizer)
        assert "momentum=0" in refused.value.hint and "sparse=False" in refused.value.hint


def test_groups_without_an_embedding_may_have_other_settings() -> None:
    model = Tagger(sparse=True)
    groups = [{"params": model.embedding.parameters()}, {"params": model.last.parameters(), "momentum": 0.9}]
    check_sparse(model, torch.optim.SGD(groups, lr=0.1))
