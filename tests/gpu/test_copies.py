"""A state on a GPU is copied into kept memory that CUDA has registered, as it was at that moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.distributed import gpu_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]


def test_a_copy_holds_what_was_there_and_its_memory_is_registered(tmp_path: Path) -> None:
    (found,) = run_ranks(gpu_jobs.copies_into_memory, 1, str(tmp_path))
    assert found == {
        "step 1": True,
        "dtypes 1": True,
        "step 2": True,
        "dtypes 2": True,
        "pinned": [True, True],
        "after": 4.0,
    }


def test_a_copy_waits_for_what_another_stream_computes(tmp_path: Path) -> None:
    (found,) = run_ranks(gpu_jobs.copies_what_another_stream_still_computes, 1, str(tmp_path))
    assert found == [True, True, True]


def test_memory_that_cuda_does_not_take_is_copied_into_and_training_goes_on() -> None:
    (found,) = run_ranks(gpu_jobs.copies_into_memory_that_cuda_refuses, 1)
    assert found == {
        "pinned": False,
        "copied": [float(number) for number in range(9)],
        "after": [float(number) for number in range(1, 10)],
    }
