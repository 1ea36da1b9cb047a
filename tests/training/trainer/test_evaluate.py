"""The held-out loss and metrics: means over samples for any batches, without a change to the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.evaluate import evaluate
from slurmddp.training.trainer.metrics import accuracy
from support.distributed import trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import trainer_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def make_parts(model: nn.Module, samples: int = 10, **settings: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return SimpleNamespace(
        heldout=TensorDataset(x, y),
        evaluated_model=model,
        ema=None,
        loss=nn.functional.cross_entropy,
        metrics={},
        data=None,
        settings=SimpleNamespace(**({"eval_batches": 3, "batch_size": 4, "compile": False} | settings)),
    )


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def test_a_frozen_layer_stays_frozen(alone: Distributon) -> None:
    """A resumed run does not evaluate first: it would train another model than the undisturbed one."""
    model = make_model()
    model[1].eval()
    evaluate(alone, make_parts(model))
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_all_samples_have_the_same_weight_with_a_partial_last_batch(alone: Distributon) -> None:
    model = make_model()
    parts = make_parts(model)
    x, y = parts.heldout.tensors
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = evaluate(alone, parts)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    expected = nn.functional.cross_entropy(model.eval()(x), y).item()
    assert found == pytest.approx({"eval_loss": expected}, rel=1e-6)


class Named(TensorDataset):
    """Targets with names, which default collation keeps as a dict."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, {"class": y, "again": y}


def test_targets_may_be_of_any_kind(alone: Distributon) -> None:
    model = make_model()
    plain, named = make_parts(model), make_parts(model)
    named.heldout = Named(*plain.heldout.tensors)
    named.loss = lambda logits, targets: nn.functional.cross_entropy(logits, targets["class"])
    assert evaluate(alone, named) == evaluate(alone, plain)


class Draws(nn.Linear):
    """Draws at random in every mode."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + torch.rand(())


def test_random_draws_of_the_model_do_not_change_the_training(alone: Distributon) -> None:
    parts, before = make_parts(Draws(6, 3)), torch.get_rng_state()
    evaluate(alone, parts)
    assert torch.equal(torch.get_rng_state(), before)


class Noted(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.read = [*getattr(self, "read", []), index]
        return super().__getitem__(index)


def test_the_samples_lie_evenly_over_the_heldout_data(alone: Distributon) -> None:
    parts = make_parts(make_model(), samples=20, eval_batches=2)
    parts.heldout = Noted(*parts.heldout.tensors)
    evaluate(alone, parts)
    assert parts.heldout.read == [0, 2, 5, 7, 10, 12, 15, 17]


def batch_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum(dim=-1).mean()


def first_class_only(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = targets == 0
    return outputs[chosen].sum(), chosen.sum()


def test_metrics_are_exact_over_samples_or_over_what_they_count(alone: Distributon) -> None:
    """10 samples in batches of 4, 4 and 2, with other numbers of the first class in each."""
    parts = make_parts(make_model())
    parts.metrics = {"accuracy": accuracy, "mean": batch_mean, "first": first_class_only}
    found = evaluate(alone, parts)
    x, y = parts.heldout.tensors
    outputs = parts.evaluated_model.eval()(x).detach()
    expected = {
        "eval_loss": nn.functional.cross_entropy(outputs, y).item(),
        "accuracy": (outputs.argmax(-1) == y).float().mean().item(),
        "mean": outputs.sum(-1).mean().item(),
        "first": outputs[y == 0].sum(-1).mean().item(),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert found is not None and list(found) == list(expected)


class Tupled(TensorDataset):
    """Samples that are dicts, with a collate of its own."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([one["x"] for one in samples]), torch.stack([one["y"] for one in samples])


def test_the_heldout_data_may_have_a_collate_or_use_the_one_of_the_training_data(alone: Distributon) -> None:
    model = make_model()
    plain, own, shared = make_parts(model), make_parts(model), make_parts(model)
    own.heldout = shared.data = Tupled(*plain.heldout.tensors)
    shared.heldout = torch.utils.data.Subset(own.heldout, range(10))
    assert evaluate(alone, own) == evaluate(alone, plain) == evaluate(alone, shared)


def test_t6_loss_and_metrics_are_the_same_on_any_number_of_ranks() -> None:
    """All ranks use the buffers of rank 0. 5 batches of 7 hold more than the 30 samples, which draw."""
    train = {"batch_size": 7, "eval_batches": 5}
    data = {"_target_": "support.distributed.exact_jobs.Blurred", "size": 40, "heldout": 30}
    config = trainer_config(
        data,
        train,
        model={"_target_": "support.distributed.exact_jobs.Noisy", "dropout": 0.0},
        metrics={"accuracy": {"_target_": "slurmddp.training.trainer.accuracy"}},
    )
    ranks = (1, 2, 3, 4)
    found = [one for n in ranks for one in run_ranks(trainer_jobs.heldout_means_of_drifted, n, config)]
    assert [one["eval_loss"] for one in found] == pytest.approx([found[0]["eval_loss"]] * 10, rel=1e-6)
    assert [one["accuracy"] for one in found] == [found[0]["accuracy"]] * 10
    assert 0 < found[0]["accuracy"] < 1


def test_a_buffer_that_is_a_view_is_shared_too() -> None:
    assert run_ranks(trainer_jobs.shared_buffer, 2) == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]] * 2
