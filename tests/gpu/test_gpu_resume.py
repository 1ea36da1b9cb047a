"""The cases of tests/support/distributed/exact_cases.py on GPUs: those with no more ranks than GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.distributed.exact_cases import CASES, TRAINER, Case, config_of, results, train
from support.distributed.trainer_runs import assert_same, final_state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

GPUS = max(1, torch.cuda.device_count())
"""At least one, so that a machine without a GPU collects the tests all the same."""
CASES_HERE = [case for case in CASES if case.ranks <= GPUS and case.program == TRAINER]
assert CASES_HERE, "an empty list would be skipped"

IN_ONE_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Lets cuBLAS sum in the same order every time; who trains exactly on a GPU has to ask for it."""


@pytest.mark.parametrize("case", CASES_HERE, ids=str)
def test_an_interrupted_training_on_gpus_ends_as_an_undisturbed_one(tmp_path: Path, case: Case) -> None:
    config = config_of(case, workers=case.workers, save_every=3)
    whole = train(tmp_path / "whole", case, config_of(case), [], **IN_ONE_ORDER)
    parts = train(tmp_path / "parts", case, config, case.halts, **IN_ONE_ORDER)
    assert_same(results(parts, case), results(whole, case))
    assert _has_cuda_state(final_state(parts)), "it was no training on a GPU"


def _has_cuda_state(state: Any) -> bool:
    """Return whether the state holds a GPU's random state, so that the training ran on a GPU."""
    if isinstance(state, dict):
        return "cuda" in state or any(_has_cuda_state(value) for value in state.values())
    return isinstance(state, list | tuple) and any(_has_cuda_state(value) for value in state)
