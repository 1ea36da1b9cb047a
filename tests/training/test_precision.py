"""Precision: the forward pass runs in 16 bits, everything that lasts stays in float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
from slurmddp.settings.keys import every_key
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


@pytest.mark.parametrize(
    ("precision", "hidden"), [("32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_only_the_forward_pass_has_another_format(precision: str, hidden: torch.dtype) -> None:
    with Distributon(1, precision=precision).launch() as d:
        model = d.setup_model(Seen())
        found = model(torch.ones(2, 4))
        d.backward(found["logits"].sum() / 2**20)
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


@pytest.mark.parametrize("compiles_first", [True, False])
def test_a_compiled_model_has_the_same_format_and_names_in_checkpoints(compiles_first, tmp_path) -> None:
    with Distributon(1, precision="bf16").launch() as d:
        bare = nn.Linear(4, 4)
        given = torch.compile(bare, backend="eager") if compiles_first else bare
        model = d.setup_model(given)
        called = model if compiles_first else torch.compile(model, backend="eager")
        out = called(torch.full((2, 4), 0.3))
        assert out.dtype == torch.float32
        assert torch.equal(out, out.bfloat16().float()), "the numbers have the precision of bfloat16"
        d.save(1, model=called, root=tmp_path)
        assert d.load(model=bare, root=tmp_path) == 1


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no precision 'bfloat16'.*bf16"):
        Distributon(precision="bfloat16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_agree_in_16_bits_and_differ_from_float32(precision: str) -> None:
    first, second = run_ranks(rank_jobs.trained, 2, precision)
    (whole, _) = run_ranks(rank_jobs.trained, 2, "32")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], whole[name]) for name in first)
    for name in first:
        torch.testing.assert_close(first[name], whole[name], rtol=0.05, atol=0.05)


def test_the_configuration_names_the_same_precisions() -> None:
    assert every_key()["train.precision"].shown_default.split(" | ") == list(PRECISIONS)


# Loss scaling.

UNIT = 2.0**-6
"""A gradient that is finite in float16 at the first scale, 2**16."""


class Scaled:
    """Two linear models with an optimizer each, in fp16."""

    def __init__(self, d: Distributon, count: int = 1) -> None:
        self.d = d
        self.models = [d.setup_model(nn.Linear(2, 1, bias=False)) for _ in range(count)]
        self.optimizers = [d.setup_optimizer(torch.optim.SGD(m.parameters(), lr=0.5)) for m in self.models]
        assert d._scaler is not None
        self.scaler = d._scaler
        with torch.no_grad():
            for model in self.models:
                model.weight.zero_()

    def backward(self, number: int = 0, factor: float = 1.0) -> None:
        """Compute gradients of `factor`, each."""
        self.d.backward(self.models[number](torch.ones(1, 2)).sum() * factor)

    def weight(self, number: int = 0) -> float:
        return self.models[number].weight[0, 0].item()

    @property
    def scale(self) -> float:
        return float(self.scaler.state_dict()["scale"])


@pytest.fixture
def fp16(request: pytest.FixtureRequest) -> Iterator[Scaled]:
    with Distributon(1, precision="fp16").launch() as d:
        yield Scaled(d, getattr(request, "param", 1))


def test_losses_are_scaled_and_steps_are_not(fp16: Scaled) -> None:
    tiny = 2.0**-30  # It vanishes in float16.
    fp16.backward(factor=tiny)
    fp16.optimizers[0].step()
    assert fp16.weight() == -0.5 * tiny


def test_a_step_with_infinite_gradients_changes_nothing_and_counts(fp16: Scaled) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(fp16.optimizers[0], 1, 0.5)
    counted: list[int] = []
    fp16.d._session.heartbeat.on_step = lambda step, seconds: counted.append(step)
    for factor in (math.inf, math.nan, 1e30, 1.0, 1.0):
        fp16.backward(factor=factor)
        fp16.d.clip_gradients(fp16.models[0], 1.0)
        fp16.optimizers[0].step()
        schedule.step()  # It would warn of a step that was not taken, and warnings are errors.
    assert counted == [1, 2, 3, 4, 5]
    assert fp16.scale == 2.0**13
    clipped = 1 / (math.sqrt(2) + 1e-6)
    assert fp16.weight() == pytest.approx(-clipped * (0.5**4 + 0.5**5))


def test_clipping_unscales_once(fp16: Scaled) -> None:
    fp16.backward(factor=3.0 * UNIT)
    fp16.backward(factor=1.0 * UNIT)
    norms = [float(fp16.d.clip_gradients(owner, UNIT)) for owner in (fp16.models[0], fp16.optimizers[0])]
    assert norms == pytest.approx([4 * math.sqrt(2) * UNIT, UNIT], rel=1e-4)
    fp16.optimizers[0].step()
    assert fp16.weight() == pytest.approx(-0.5 / math.sqrt(2) * UNIT, rel=1e-4)


@pytest.mark.parametrize("fp16", [2], indirect=True)
def test_each_optimizer_is_decided_on_its_own_and_waiting_gradients_follow_the_scale(fp16: Scaled) -> None:
    fp16.backward(1, 4.0 * UNIT)
    fp16.backward(0, math.inf)
    fp16.optimizers[0].step()
    fp16.optimizers[0].zero_grad()
    fp16.backward(0, 1.0 * UNIT)  # At half of the scale; the gradients of the other model have the old one.
    fp16.backward(1, 2.0 * UNIT)
    for optimizer in fp16.optimizers:
        optimizer.step()
    assert (fp16.weight(0), fp16.weight(1)) == (-0.5 * UNIT, -3.0 * UNIT)
    assert fp16.scale == 2.0**15


def test_t7_the_scale_is_saved_and_loaded_with_every_checkpoint(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with Distributon(1, precision="fp16").launch() as d:
            mine = Scaled(d)
            d.load(root=tmp_path, model=mine.models[0])
            found.append(mine.scale)
            mine.backward(factor=math.inf)
            mine.optimizers[0].step()
            d.save(1, root=tmp_path, model=mine.models[0])
            mine.backward(factor=math.inf)
            mine.optimizers[0].step()
            d.load(root=tmp_path, model=mine.models[0])
            found.append(mine.scale)
    assert found == [2.0**16, 2.0**15, 2.0**15, 2.0**14]


def test_a_load_without_a_scale_begins_with_the_first_one(tmp_path: Path) -> None:
    with Distributon(1).launch() as d:
        d.save(1, root=tmp_path, model=d.setup_model(nn.Linear(2, 1, bias=False)))
    with Distributon(1, precision="fp16").launch() as d:
        mine = Scaled(d)
        mine.backward(factor=math.inf)
        mine.optimizers[0].step()
        assert mine.scale == 2.0**15
        d.load(root=tmp_path, model=mine.models[0])
        assert mine.scale == 2.0**16


def test_what_fp16_can_not_scale_is_refused(fp16: Scaled) -> None:
    parameters = list(fp16.models[0].parameters())
    fp16.models[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"call d\.backward\(loss\)"):
        fp16.optimizers[0].step()
    with pytest.raises(ConfigError, match="closure"):
        fp16.d.setup_optimizer(torch.optim.LBFGS(parameters)).step(lambda: torch.ones(()))
    other = fp16.d.setup_model(nn.Linear(2, 1))
    fp16.d.backward(other(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match="2 parameters with gradients belong to no optimizer"):
        fp16.d.clip_gradients(other, 1.0)


def test_ranks_leave_out_a_step_together() -> None:
    first, second = run_ranks(rank_jobs.left_out_on_one_rank, 2)
    assert first == second == {"scale": 2.0**15, "changed": [False, True]}
