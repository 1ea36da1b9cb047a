"""The cases of tests/support/distributed/exact_cases.py on GPUs: those with no more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.runs.folder.layout import RunFolder
from support.distributed import exact_jobs
from support.distributed.exact_cases import CASES, TRAINER, Case, assert_ended, config_of, shown, written
from support.distributed.exact_jobs import Halt
from support.distributed.ranks import place_environments, run_ranks
from support.distributed.trainer_runs import assert_same, final_state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

GPUS = max(1, torch.cuda.device_count())
"""At least one, so that a machine without a GPU collects the tests all the same."""
CASES_HERE = [case for case in CASES if case.ranks <= GPUS and case.program == TRAINER]
assert CASES_HERE, "an empty list would be skipped"

IN_ONE_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Lets cuBLAS sum in the same order every time; who trains exactly on a GPU has to ask for it."""


def train(folder: Path, case: Case, config: dict[str, Any], halts: Sequence[Halt]) -> RunFolder:
    folder.mkdir()
    for number, halt in enumerate([*halts, None]):
        places = [place | IN_ONE_ORDER for place in place_environments(case.ranks)]
        given = (config, str(folder), number, halt)
        assert_ended(run_ranks(exact_jobs.attempt, case.ranks, *given, environments=places), halt)
    return RunFolder(folder)


@pytest.mark.parametrize("case", CASES_HERE, ids=str)
def test_an_interrupted_training_on_gpus_ends_as_an_undisturbed_one(tmp_path: Path, case: Case) -> None:
    whole = train(tmp_path / "whole", case, config_of(case), [])
    config = config_of(case, workers=case.workers, save_every=3)
    parts = train(tmp_path / "parts", case, config, case.halts)
    assert_same(final_state(whole), final_state(parts))
    assert shown(parts) == shown(whole)
    if "killed" not in case.places:
        assert written(parts) == written(whole)
    assert _has_cuda_state(final_state(parts)), "it was no training on a GPU"


def _has_cuda_state(state: Any) -> bool:
    """Return whether the state holds a GPU's random state, so that the training ran on a GPU."""
    if isinstance(state, dict):
        return "cuda" in state or any(_has_cuda_state(value) for value in state.values())
    return isinstance(state, list | tuple) and any(_has_cuda_state(value) for value in state)
