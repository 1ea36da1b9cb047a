"""An error of one rank within a save or a load is raised on all ranks, and no rank hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.distributed import alone_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def test_an_error_of_one_rank_is_raised_on_all_ranks_which_stay_in_step(tmp_path: Path) -> None:
    found = run_ranks(alone_jobs.raise_in_each_place, 2, str(tmp_path), timeout_s=100)
    places = alone_jobs._PLACES
    for rank, said in enumerate(found):
        assert said.pop("all_reduce") == "0.5", "the ranks are in step"
        assert said.keys() == places.keys()
        for name, text in said.items():
            own = places[name][2] == rank
            assert ("RuntimeError: " if own else "SlurmddpError: Rank ") in text
            assert f"only here, in {name}" in text


@pytest.mark.parametrize(
    ("place", "found"), [("none", (2, "memory")), ("read", (1, "disk")), ("send", (1, "disk"))]
)
def test_memory_that_one_rank_can_not_read_is_used_by_no_rank(
    tmp_path: Path, place: str, found: tuple[int, str]
) -> None:
    assert run_ranks(alone_jobs.load_from_memory, 2, str(tmp_path), place, timeout_s=100) == [found] * 2


def test_a_rank_that_can_not_copy_blocks_no_other_rank(tmp_path: Path) -> None:
    found = run_ranks(alone_jobs.copy_that_fails_on_one_rank, 2, str(tmp_path), timeout_s=100)
    assert found == [[True, False], [False, True]]


def test_a_rank_that_leaves_by_an_error_waits_for_no_other_rank(tmp_path: Path) -> None:
    run_ranks(alone_jobs.leave_by_an_error, 2, str(tmp_path / "checkpoints"), str(tmp_path))
