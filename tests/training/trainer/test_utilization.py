"""Floating point operations, MFU and peak memory of a training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.status.peak_memory import newest_peak_memory
from slurmddp.training.builtin.gpt import GPT
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer import utilization
from slurmddp.training.trainer.utilization import Utilization, count_flops, peak_flops, utilization_text
from support.distributed import trainer_jobs
from support.distributed.exact_cases import Case, config_of
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import new_folder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


class Counted(nn.Module):
    """Draws, counts its calls and changes buffers when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(6, 4), nn.BatchNorm1d(4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.norm(self.layer(x) + torch.rand(4))
        return found


def test_counting_leaves_no_trace() -> None:
    model, inputs = Counted(), torch.randn(8, 6)
    before, randomness = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    flops = count_flops(model, cross_entropy, (inputs, torch.zeros(8, dtype=torch.int64)))
    # A multiply and an add for each pair of sample and weight, forward and for the gradient of the weights.
    # The inputs need no gradient.
    assert flops == 2 * (2 * 8 * 6 * 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert model.calls == 0 and all(parameter.grad is None for parameter in model.parameters())


def test_the_operations_of_a_gpt_follow_from_its_sizes() -> None:
    vocab, length, width, layers, batch = 11, 8, 16, 2, 3
    model = GPT(vocab_size=vocab, context=length, width=width, layers=layers, heads=2)
    ids = torch.zeros(batch, length, dtype=torch.int64)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    matrices = layers * 12 * width**2 + vocab * width
    attention = layers * 2 * length * width
    assert count_flops(model, loss, (ids, ids)) == 3 * 2 * batch * length * (matrices + attention)


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


def made(
    d: Distributon, model: nn.Module, **settings: Any
) -> tuple[Utilization, list[tuple[str, dict[str, Any]]]]:
    """Return a record of utilization, and the list of its events."""
    events: list[tuple[str, dict[str, Any]]] = []
    components: Any = SimpleNamespace(
        settings=SimpleNamespace(**{"flops": True, "precision": "bf16"} | settings),
        loader=SimpleNamespace(accumulate=2),
        bare_model=model,
        loss=lambda outputs, targets: outputs.sum(),
        units_per_step=lambda world_size: 16,
    )
    journal: Any = SimpleNamespace(event=lambda name, **facts: events.append((name, facts)))
    return Utilization(d, components, journal), events


def test_a_model_that_can_not_be_counted_is_told(alone: Distributon) -> None:
    used, events = made(alone, Branches(6, 6))
    used.count((torch.ones(8, 6), None))
    assert used.at(100.0) == {}
    assert [name for name, _ in events] == ["warned"] and "can't be counted" in events[0][1]["text"]


def test_the_rate_gives_flops_and_mfu(alone: Distributon, monkeypatch: pytest.MonkeyPatch) -> None:
    used, events = made(alone, nn.Linear(6, 4))
    assert used.at(100.0) == {}
    used.count((torch.ones(8, 6), None))
    flops = 2 * (2 * 8 * 6 * 4) * 2 * 32 / 16
    assert used.at(32.0) == {"tflops": pytest.approx(flops / 1e12)}, "the peak of a CPU is not known"
    monkeypatch.setattr(utilization, "peak_flops_of", lambda device, precision: 4 * flops)
    assert used.at(32.0)["mfu"] == pytest.approx(0.25)
    assert utilization_text({"tflops": 123.4, "mfu": 0.395}) == ", 123 TFLOP/s per rank, MFU 40%"
    assert events == []


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312e12),
        ("NVIDIA A100-SXM4-80GB", "32", False, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "32", True, 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989e12),
        ("NVIDIA H100 PCIe", "bf16", True, 756e12),
        ("NVIDIA H200", "bf16", False, 989e12),
        ("NVIDIA L40S", "bf16", False, 362e12),
        ("Tesla V100-SXM2-32GB", "bf16", False, None),
        ("NVIDIA GeForce RTX 3090", "bf16", False, None),
    ],
)
def test_the_peak_of_a_gpu(name: str, precision: str, tf32: bool, peak: float | None) -> None:
    assert peak_flops(name, precision, tf32=tf32) == peak


def test_a_training_records_operations_and_the_memory_of_all_ranks(tmp_path: Path) -> None:
    case = Case("", 2, "", train=(("flops", True), ("steps", 2)))
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 2, config_of(case), str(folder.path), None)
    lines = [line for line in read_lines(folder.metrics_file) if "loss" in line]
    assert all(line["tflops"] > 0 and "mfu" not in line for line in lines)
    peak = newest_peak_memory(folder.events())
    assert peak is not None and peak.device == "cpu" and len(peak.ranks) == 2
    assert min(peak.ranks) > 50 << 20
