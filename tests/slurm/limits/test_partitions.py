from __future__ import annotations

import pytest

from slurmddp.slurm.limits.partitions import check, parse_partitions
from support.slurm.slurm_jobs import PARTITIONS, make_job

SITE = parse_partitions(PARTITIONS)


def test_limits_are_read_from_scontrol() -> None:
    low, high = SITE["low"], SITE["high"]
    assert (low.is_default, low.max_time_min, low.max_nodes, low.total_nodes) == (True, 1440, None, 4)
    assert (high.is_default, high.max_time_min, high.max_nodes, high.total_nodes) == (False, None, 2, 4)


def test_nothing_is_read_from_nothing() -> None:
    assert parse_partitions("") == {}
    assert check(make_job(partition="gpu"), {}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": "low", "nodes": 4, "time_limit_min": 1440},
        {"partition": "high", "nodes": 2, "time_limit_min": 100_000},
        {"partition": "high,low", "nodes": 4},
    ],
)
def test_what_fits_has_no_problems(changes: dict[str, object]) -> None:
    assert check(make_job(**changes), SITE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "hihg"}, ["'hihg'", "Did you mean high", "partition="]),
        ({"nodes": 5}, ["nodes=5", "'low'", "at most 4 (TotalNodes)", "nodes=4"]),
        ({"partition": "high", "nodes": 3}, ["nodes=3", "'high'", "at most 2 (MaxNodes)"]),
        ({"time_limit_min": 1441}, ["1-00:01:00", "'low'", "time_limit=1-00:00:00"]),
        ({"partition": "old", "nodes": 1}, ["INACTIVE"]),
    ],
)
def test_what_can_never_start_is_told_with_what_to_change(
    changes: dict[str, object], words: list[str]
) -> None:
    problems = [str(one) for one in check(make_job(**changes), SITE)]
    assert len(problems) == 1
    assert [word for word in words if word not in problems[0]] == []


def test_every_problem_is_told() -> None:
    assert len(check(make_job(partition="low", nodes=9, time_limit_min=9999), SITE)) == 2


def test_without_a_default_partition_one_must_be_named() -> None:
    site = parse_partitions(PARTITIONS.replace("Default=YES", "Default=NO"))
    assert "partition=" in str(check(make_job(), site)[0])
