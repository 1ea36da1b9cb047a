"""A loss that counts tokens: its mean over a step is that of all ranks and batches taken together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slurmddp.training.data.sampler import RankSampler
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.step_loss import StepLoss
from support.distributed import padded_jobs
from support.distributed.padded_jobs import Rows, Tokens
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import curve, final_state, new_folder, trainer_config

STEPS, SAMPLES = 6, 8
"""Steps of a training, and the samples of each step over all ranks."""
Numbers = dict[tuple[int, str], float]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def steps_of_samples() -> Iterator[list[int]]:
    sampler = RankSampler(len(Rows()), batch_size=SAMPLES, seed=0)
    for epoch in range(2):
        sampler.seek(epoch, 0)
        samples = list(sampler)
        yield from (samples[at : at + SAMPLES] for at in range(0, len(samples), SAMPLES))


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, torch.Tensor], Numbers]:
    """The weights and losses of plain torch, on the whole batch of each step."""
    torch.manual_seed(0)
    model, rows, heldout = Tokens(), Rows(), Rows(13, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses: Numbers = {}
    for step, samples in zip(range(1, STEPS + 1), steps_of_samples(), strict=False):
        loss = loss_of(model, rows.inputs[samples], rows.targets[samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step, "loss"] = loss.item()
    with torch.no_grad():
        losses[STEPS, "eval_loss"] = loss_of(model, heldout.inputs, heldout.targets).item()
    return model.state_dict(), losses


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    ("ranks", "batch_size", "strategy"),
    [
        (1, 8, {"name": "ddp"}),
        (1, 2, {"name": "ddp"}),
        (2, 4, {"name": "ddp"}),
        (2, 2, {"name": "ddp"}),
        (4, 1, {"name": "ddp", "zero_optimizer": True}),
        (2, 2, {"name": "fsdp"}),
        (2, 2, {"name": "ring"}),
        (2, 2, {"name": "parameter_server"}),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_ranks_and_batches_of_a_step_weigh_by_their_tokens(
    ranks: int,
    batch_size: int,
    strategy: dict[str, Any],
    reference: tuple[dict[str, torch.Tensor], Numbers],
    tmp_path: Path,
) -> None:
    folder = new_folder(tmp_path / "run")
    settings = {
        "steps": STEPS, "global_batch": SAMPLES, "batch_size": batch_size, "clip_norm": None, "log_every": 1,
        "save_every": 0, "eval_every": 0, "eval_batches": 20,
    }  # fmt: skip
    config = trainer_config(
        {"_target_": "support.distributed.padded_jobs.Rows"},
        settings,
        model={"_target_": "support.distributed.padded_jobs.Tokens"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9},
    )
    run_ranks(padded_jobs.trained, ranks, config, str(folder.path), strategy)
    weights, losses = reference
    for name, value in final_state(folder)["objects"]["model"].items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    found = {key: value for key, (value, _) in curve(folder).items()}
    for key, loss in losses.items():
        assert found[key] == pytest.approx(loss, abs=2e-6), key


def test_a_mean_is_divided_by_the_number_of_batches(alone: Distributon) -> None:
    step = StepLoss(alone, 2)
    assert [step.add(torch.tensor(value)).item() for value in (1.0, 4.0)] == [1.0, 4.0]
    assert step.finish(nn.Linear(1, 1)).item() == 2.5


def test_batches_without_a_single_token_leave_the_mean_of_the_others(alone: Distributon) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    step = StepLoss(alone, 3)
    for count in (0, 4, 0):
        inputs = torch.ones(count, 1, dtype=torch.float64)
        alone.backward(step.add((model(inputs).sum(), count)), accumulate=3)
    assert step.finish(model).item() == pytest.approx(model.weight.item(), rel=1e-6)
    assert model.weight.grad is not None and model.weight.grad.item() == pytest.approx(1)


def test_replicas_that_train_alone_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with Distributon(1, strategy="local_sgd").launch() as d:
        monkeypatch.setattr(type(d), "all_reduce", None)
        step = StepLoss(d, 1)
        assert step.add((torch.tensor(6.0), 3)).item() == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replica_without_a_token_takes_a_step_without_a_gradient(accumulate: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    with Distributon(1, strategy="local_sgd").launch() as d:
        step = StepLoss(d, accumulate)
        for _ in range(accumulate):
            d.backward(step.add((model(torch.ones(0, 1)).sum(), 0)), accumulate=accumulate)
        assert step.finish(model).item() == 0
    assert model.weight.grad is not None and model.weight.grad.item() == 0
