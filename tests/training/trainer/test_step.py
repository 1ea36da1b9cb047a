"""One optimizer step of the default program, compared with plain torch, and its log line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training import run_log
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.batch import loss_of_output
from slurmddp.training.trainer.callbacks import Callbacks
from slurmddp.training.trainer.components import Components
from slurmddp.training.trainer.ema import AverageOfWeights
from slurmddp.training.trainer.loop import Training, token_cross_entropy


def batches(size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    while True:
        yield torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def make(
    d: Distributon,
    folder: Path,
    accumulate: int = 1,
    clip_norm: float | None = None,
    on_spike: str = "fail",
    ema: float | None = None,
) -> tuple[Training, nn.Module]:
    torch.manual_seed(1)
    model = d.setup_model(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(
            steps=100,
            max_time=None,
            best=None,
            memory_save_every=0,
            clip_norm=clip_norm,
            on_spike=on_spike,
            flops=False,
        ),
        loader=SimpleNamespace(batch_size=4, accumulate=accumulate),
        model=model,
        bare_model=model,
        loss=cross_entropy,
        metrics={},
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1),
        ema=None if ema is None else AverageOfWeights(model, ema),
        unit="tokens",
        units_per_sample=7,
    )
    parts.units_per_step = partial(Components.units_per_step, parts)
    return Training(d, parts, Callbacks({}), RunFolder(folder)), model


def gradients_of(count: int) -> tuple[list[torch.Tensor], float]:
    """Return gradients and loss of the first `count` batches taken as one."""
    torch.manual_seed(1)
    model, source = nn.Linear(6, 3), batches()
    inputs, targets = (torch.cat(parts) for parts in zip(*(next(source) for _ in range(count)), strict=True))
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], loss.item()


@pytest.mark.parametrize("clip_norm", [None, 0.01, 100.0])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_follows_the_clipped_mean_gradient(
    alone: Distributon, tmp_path: Path, accumulate: int, clip_norm: float | None
) -> None:
    training, model = make(alone, tmp_path, accumulate, clip_norm)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    training.take_step(batches())
    gradients, _ = gradients_of(accumulate)
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])).item()
    scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(old - new, 0.5 * scale * gradient, rtol=1e-4, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_clipping_and_the_logged_norm_see_unscaled_gradients_in_fp16(
    tmp_path: Path, clip_norm: float | None
) -> None:
    """A step whose scaled gradients are infinite is left out of weights and average, and has no norm."""
    gradients, _ = gradients_of(1)
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])).item()
    scale = 1.0 if clip_norm is None else clip_norm / norm
    with Distributon(1, seed=0, precision="fp16") as d:
        training, model = make(d.launch(), tmp_path, clip_norm=clip_norm, ema=0.75)
        average = training.components.ema.model
        d.setup_optimizer(training.components.optimizer)
        before = model.weight.detach().clone()
        training.take_step(batches())
        after, average_after = model.weight.detach().clone(), average.weight.clone()
        training.components.loss = lambda *given: 1e30 * cross_entropy(*given)  # type: ignore[misc]
        training.take_step(batches())
        training._collect_losses()
    torch.testing.assert_close(before - after, 0.5 * scale * gradients[0], rtol=1e-2, atol=1e-5)
    assert torch.equal(model.weight, after)
    assert torch.equal(average.weight, average_after)
    assert (len(training._losses), training._norms) == (2, [pytest.approx(norm, rel=1e-2)])


def test_a_skipped_step_leaves_weights_and_their_average_unchanged(
    alone: Distributon, tmp_path: Path
) -> None:
    training, model = make(alone, tmp_path, on_spike="skip", ema=0.75)
    average = training.components.ema.model
    spoilt = torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.int64)
    training.take_step(batches())
    kept = [one.clone() for one in (*model.parameters(), *average.parameters())]
    training.take_step(iter([spoilt]))
    assert not torch.equal(kept[0], kept[2]), "the average lags behind"
    for before, now in zip(kept, (*model.parameters(), *average.parameters()), strict=True):
        assert torch.equal(before, now)


def test_a_line_has_the_losses_and_the_rate_since_the_last_one(
    alone: Distributon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = (second**2 for second in range(1000))
    monkeypatch.setattr(run_log, "time", SimpleNamespace(perf_counter=lambda: next(clock), time=lambda: 0.0))
    training, model = make(alone, tmp_path, accumulate=2)
    source, expected = batches(), []
    for _ in range(2):
        expected.append(gradients_of(2)[1] if not expected else loss_ahead(model, len(expected)))
        training.take_step(source)
    training.log()
    last = loss_ahead(model, 2)
    training.take_step(source)
    training.log()
    lines = list(read_lines(RunFolder(tmp_path).metrics_file))
    assert [line["loss"] for line in lines] == pytest.approx([sum(expected) / 2, last], rel=1e-5)
    assert [line["lr"] for line in lines] == pytest.approx([0.05, 0.005]), "that of the last step"
    # Steps of 4 x 2 samples of 7 tokens; the first two take 3 and 7 seconds, the third one 15. Reading their
    # losses, for which a GPU would be awaited, takes 11 and 19 seconds.
    assert [line["tokens_per_s"] for line in lines] == [5.3, 1.6]


def loss_ahead(model: nn.Module, step: int) -> float:
    """Return the loss of the two batches of step `step`, as the model is now."""
    source = batches()
    for _ in range(2 * step):
        next(source)
    with torch.no_grad():
        return sum(cross_entropy(model(x), y).item() for x, y in (next(source) for _ in range(2))) / 2


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 56), (3, 168)])
def test_a_step_counts_the_tokens_of_all_ranks(
    alone: Distributon, tmp_path: Path, ranks: int, tokens: int
) -> None:
    training, _ = make(alone, tmp_path, accumulate=2)
    assert training.components.units_per_step(ranks) == tokens


@pytest.mark.parametrize(
    ("loss", "ranks", "accumulate", "batch", "warns"),
    [
        (loss_of_output, 2, 1, {"labels": torch.tensor([3, -100])}, True),
        (loss_of_output, 1, 2, {"labels": torch.tensor([3, -100])}, True),
        (loss_of_output, 1, 1, {"labels": torch.tensor([3, -100])}, False),
        (loss_of_output, 2, 1, {"labels": torch.tensor([3, 100])}, False),
        (loss_of_output, 2, 1, {"inputs": torch.tensor([-100])}, False),
        (token_cross_entropy, 2, 1, {"labels": torch.tensor([3, -100])}, False),
    ],
)
def test_padded_labels_of_a_model_that_takes_its_own_mean_are_named(
    loss: Any, ranks: int, accumulate: int, batch: dict[str, torch.Tensor], warns: bool
) -> None:
    warnings: list[tuple[str, str]] = []
    training: Any = SimpleNamespace(
        components=SimpleNamespace(loss=loss, loader=SimpleNamespace(accumulate=accumulate)),
        distributon=SimpleNamespace(world_size=ranks),
        _warn=lambda *warning: warnings.append(warning),
    )
    Training.warn_of_ignored_targets(training, batch)
    assert len(warnings) == warns


@pytest.mark.parametrize(
    ("metrics", "heldout", "eval_batches", "warns"),
    [({"f1": 1}, None, 4, True), ({"f1": 1}, [1], 0, True), ({"f1": 1}, [1], 4, False), ({}, None, 4, False)],
)
def test_metrics_that_are_never_computed_are_named(
    metrics: Any, heldout: Any, eval_batches: int, warns: bool
) -> None:
    warnings: list[tuple[str, str]] = []
    settings = SimpleNamespace(eval_batches=eval_batches)
    components = SimpleNamespace(metrics=metrics, heldout=heldout, settings=settings, data=[])
    training: Any = SimpleNamespace(components=components, _warn=lambda *warning: warnings.append(warning))
    Training.warn_of_unused_metrics(training)
    assert len(warnings) == warns
    if warns:
        assert "metrics.f1 will not be computed: list has no held-out data" in warnings[0][1]
