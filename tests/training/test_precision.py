"""Precision: the forward pass runs in bfloat16, everything that lasts stays in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.config.schema import every_key
from slurmddp.errors import ConfigError
from slurmddp.training.distributon import Distributon
from slurmddp.training.precision import PRECISIONS
from support.distributed import rank_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


class Seen(nn.Module):
    """Keeps the format of its hidden layer; raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.layer(x)
        self.hidden.append(hidden.dtype)
        if self.fails:
            raise ValueError("broken")
        return {"logits": hidden, "count": torch.tensor(3), "name": "x"}


@pytest.mark.parametrize(("precision", "hidden"), [("32", torch.float32), ("bf16", torch.bfloat16)])
def test_only_the_forward_pass_has_another_format(precision: str, hidden: torch.dtype) -> None:
    with Distributon(1, precision=precision).launch() as d:
        model = d.setup_model(Seen())
        found = model(torch.ones(2, 4))
        d.backward(found["logits"].sum())
        assert model.hidden == [hidden]
        assert (found["logits"].dtype, found["count"].dtype, found["name"]) == (
            torch.float32,
            torch.int64,
            "x",
        )
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        model.fails = True
        with pytest.raises(ValueError, match="broken"):
            model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")


def test_a_copy_of_the_model_has_its_own_weights_and_the_same_format() -> None:
    with Distributon(1, precision="bf16").launch() as d:
        model = d.setup_model(Seen())
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.layer.weight.zero_(), twin.layer.bias.zero_()
        assert twin(torch.ones(2, 4))["logits"].abs().sum() == 0
        assert twin.hidden == [torch.bfloat16]


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no precision 'bfloat16'.*bf16"):
        Distributon(precision="bfloat16")


def test_ranks_agree_in_bfloat16_and_differ_from_float32() -> None:
    first, second = run_ranks(rank_jobs.trained, 2, "bf16")
    (whole, _) = run_ranks(rank_jobs.trained, 2, "32")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], whole[name]) for name in first)
    for name in first:
        torch.testing.assert_close(first[name], whole[name], rtol=0.05, atol=0.05)


def test_the_configuration_names_the_same_precisions() -> None:
    assert every_key()["train.precision"].shown_default.split(" | ") == list(PRECISIONS)
