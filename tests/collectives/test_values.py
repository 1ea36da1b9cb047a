"""Values between ranks arrive unchanged, and never run code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from slurmddp.collectives.values import pack, unpack
from slurmddp.errors import CheckpointError
from support.distributed import gather_jobs
from support.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.usefixtures("rank_server")
def test_received_values_equal_the_sent_values() -> None:
    told = run_ranks(gather_jobs.values, 2)
    for number, (gathered, at_zero, of_zero) in enumerate(told):
        assert [one["rank"] for one in gathered] == [0, 1]
        assert [len(one["long"]) for one in gathered] == [0, 100_000]
        assert [one["words"] for one in gathered] == [[0], [1]]
        assert gathered[1][7] == (None, True, 1.5, float("inf"), 1 << 80, "ü")
        assert at_zero == (gathered if number == 0 else [])
        assert of_zero == gathered[0]


@pytest.mark.usefixtures("rank_server")
def test_a_value_that_can_not_be_sent_is_an_error_on_every_rank() -> None:
    zero, one = run_ranks(gather_jobs.errors, 2)
    for own, other in ((one[0], zero[0]), (one[1], zero[1]), (zero[2], one[2])):
        assert own[0] == other[0] == "CheckpointError"
        assert "builtins.object" in own[1]
        assert other[1].startswith("Rank ")
        assert other[1].endswith(own[1])
    assert one[3][0] == "OwnError"
    assert zero[3][0] == "MismatchError", "the nearest kind that all ranks know"
    assert zero[3][1].endswith(": 3 nodes")
    assert zero[3][2] == one[3][2] == 76
    assert zero[4] == one[4] == [0, 1], "the ranks go on together"


@pytest.mark.usefixtures("rank_server")
def test_a_pickle_from_another_process_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    told, _ = run_ranks(gather_jobs.with_a_hostile_rank, 2, str(mark))
    assert "are damaged" in told
    assert not mark.exists()


def test_invalid_bytes_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    whole = pack({"a": 1})
    hostile = pickle.dumps(gather_jobs.Hostile(str(mark)))
    for data in (b"", hostile, whole[:-1], whole + hostile, b"\xff" * 40, pack(1)[:8] + b"[[" * 9):
        with pytest.raises(CheckpointError):
            unpack(data)
    assert not mark.exists()
    pickle.loads(hostile)
    assert mark.exists(), "the test's payload works where something unpickles it"
