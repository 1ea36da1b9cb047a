"""The device of a rank on a machine with GPUs, NCCL in a group of one, and the preflight's check of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.distributed import gpu_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("rank_server")]

ON_GPU = {"device": "cuda:0", "current": True, "sum": 6.0}


def test_a_rank_takes_the_gpu_that_is_there() -> None:
    assert run_ranks(gpu_jobs.choices, 1) == [{"index": 0, "backend": "nccl"}]
    assert run_ranks(gpu_jobs.place_of_a_rank, 1, None) == [ON_GPU]


def test_a_gpu_may_be_named_by_index_or_uuid_or_hidden() -> None:
    (name,) = run_ranks(gpu_jobs.name_of_gpu, 1)
    for visible in ("0", name):
        assert run_ranks(gpu_jobs.place_of_a_rank, 1, visible) == [ON_GPU], visible
    assert run_ranks(gpu_jobs.place_of_a_rank, 1, "") == [{"device": "cpu", "current": False, "sum": 6.0}]


def test_a_group_of_one_over_nccl_trains_as_no_group_does() -> None:
    assert run_ranks(gpu_jobs.nccl_group_of_one, 1) == [{"backend": "nccl", "same": True, "sum": None}]


def test_the_preflight_finds_nothing_wrong_with_a_good_gpu(tmp_path: Path) -> None:
    (right,) = run_ranks(gpu_jobs.preflight_of_one, 1, str(tmp_path))
    assert right == {"torch.float32": True, "torch.bfloat16": True, "torch.float16": True}
    events = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "preflight"]
    assert event["failed"] == []
