"""Every strategy, precision and hook computes on GPUs what one process computes on a CPU.

With fewer than two GPUs, two ranks share one and exchange over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.strategies import build
from support.distributed import contract_jobs, gpu_jobs, rank_jobs, strategy_jobs
from support.distributed.contract_jobs import CASES
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

TOLERANCE = 1e-4


def difference(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max(float((weights[name] - value).abs().max()) for name, value in others.items())


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """The weights of one process on a CPU."""
    weights: dict[str, torch.Tensor] = contract_jobs.trained(build("single"))["weights"]
    return weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_strategy_on_gpus_computes_the_steps_of_one_process(
    case: tuple[str, dict[str, Any]], reference: dict[str, torch.Tensor]
) -> None:
    first, second = run_ranks(gpu_jobs.on_gpu, 2, contract_jobs.training_of, *case)
    assert difference(first["weights"], reference) <= TOLERANCE
    assert difference(first["weights"], second["weights"]) == 0, "replicas have equal bits"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_strategy_runs_its_collectives_over_nccl(
    case: tuple[str, dict[str, Any]], reference: dict[str, torch.Tensor]
) -> None:
    (training,) = run_ranks(gpu_jobs.training_in_group_of_one, 1, *case)
    assert difference(training["weights"], reference) <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"comm_hook": "fp16"},
        {"comm_hook": "bf16"},
        {"comm_hook": "powersgd", "hook_start_step": 2, "powersgd_rank": 2},
        {"comm_hook": "post_local_sgd", "hook_start_step": 2, "average_every": 2, "group_ranks": 1},
        {"zero_optimizer": True},
        {"name": "fsdp"},
    ],
    ids=str,
)
def test_a_strategy_on_gpus_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    trainings = run_ranks(gpu_jobs.on_gpu, 2, strategy_jobs.trained_with, options, str(tmp_path))
    resumed = run_ranks(gpu_jobs.on_gpu, 2, strategy_jobs.resumed_with, options, str(tmp_path))
    for training, weights in zip(trainings, resumed, strict=True):
        assert difference(weights, training["whole"]) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_on_gpus_agree_in_16_bits(precision: str) -> None:
    first, second = run_ranks(gpu_jobs.on_gpu, 2, rank_jobs.trained, precision)
    (whole, _) = run_ranks(gpu_jobs.on_gpu, 2, rank_jobs.trained, "32")
    assert difference(first, second) == 0
    assert 0 < difference(first, whole) < 0.05


def test_ranks_on_gpus_leave_out_a_step_together() -> None:
    first, second = run_ranks(gpu_jobs.on_gpu, 2, rank_jobs.left_out_on_one_rank)
    assert first == second == {"scale": 2.0**15, "changed": [False, True]}


def test_ranks_on_gpus_clip_the_averaged_gradients_alike() -> None:
    (gradients, norm, left), (others, other_norm, _) = run_ranks(gpu_jobs.on_gpu, 2, rank_jobs.clipped)
    assert norm == other_norm > 0.01
    assert left == pytest.approx(0.01, rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
