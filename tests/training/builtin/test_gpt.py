"""The GPT: shapes, causality, randomness that stays its own, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.training.builtin.gpt import GPT
from slurmddp.training.trainer.loop import token_cross_entropy


def tiny(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 11, "context": 8, "width": 16, "layers": 2, "heads": 2, **changes})


def test_logits_for_every_position_and_class() -> None:
    assert tiny()(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)


def test_a_prediction_does_not_see_what_follows() -> None:
    model = tiny().eval()
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5:] = 10
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_it_begins_undecided() -> None:
    ids = torch.randint(11, (16, 8), generator=torch.Generator().manual_seed(0))
    total, count = token_cross_entropy(tiny()(ids), ids.flip(1))
    assert total.item() / count.item() == pytest.approx(math.log(11), abs=0.1)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, loose = tiny(), tiny(tie_embeddings=False)
    assert tied.head.weight is tied.tokens.weight
    assert sum(p.numel() for p in loose.parameters()) == sum(p.numel() for p in tied.parameters()) + 11 * 16


def test_dropout_acts_in_training_only() -> None:
    model, ids = tiny(dropout=0.5), torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_generating_draws_from_its_own_generator_only() -> None:
    model, prompt = tiny().eval(), torch.tensor([[1, 2]])
    before = torch.get_rng_state()
    texts = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert texts[0].shape == (1, 22)
    assert texts[0][0, :2].tolist() == [1, 2]


def test_it_learns_to_count() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = (torch.arange(9) + torch.arange(11)[:, None]) % 11
    for _ in range(60):
        total, count = token_cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 15}, "15, which is no multiple of model.heads=2"),
        ({"layers": 0}, r"model\.layers is 0"),
        ({"context": -1}, r"model\.context is -1"),
        ({"dropout": 1.0}, r"model\.dropout is 1\.0"),
    ],
)
def test_impossible_sizes_are_refused(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_more_tokens_than_context() -> None:
    with pytest.raises(ConfigError, match=r"of 9 tokens, and model\.context is 8\. Set model\.context=9"):
        tiny()(torch.zeros(1, 9, dtype=torch.int64))
