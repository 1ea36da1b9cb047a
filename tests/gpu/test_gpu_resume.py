"""The cases of tests/support/distributed/exact_cases.py on GPUs, which ranks share if there are too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.distributed import gpu_jobs
from support.distributed.exact_cases import CASES, TRAINER, Case, config_of, results, train
from support.distributed.trainer_runs import assert_same, final_state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

IN_ONE_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Lets cuBLAS sum in the same order every time; who trains exactly on a GPU has to ask for it."""


@pytest.mark.parametrize("case", [case for case in CASES if case.program == TRAINER], ids=str)
def test_an_interrupted_training_on_gpus_ends_as_an_undisturbed_one(tmp_path: Path, case: Case) -> None:
    config = config_of(case, workers=case.workers, save_every=3)
    whole = train(tmp_path / "whole", case, config_of(case), [], gpu_jobs.on_gpu, **IN_ONE_ORDER)
    parts = train(tmp_path / "parts", case, config, case.halts, gpu_jobs.on_gpu, **IN_ONE_ORDER)
    assert_same(results(parts, case), results(whole, case))
    assert _has_cuda_state(final_state(parts)), "it was no training on a GPU"


def _has_cuda_state(state: Any) -> bool:
    """Return whether the state holds a GPU's random state, so that the training ran on a GPU."""
    if isinstance(state, dict):
        return "cuda" in state or any(_has_cuda_state(value) for value in state.values())
    return isinstance(state, list | tuple) and any(_has_cuda_state(value) for value in state)
