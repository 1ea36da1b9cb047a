"""Accounts and limits, as sacctmgr prints them."""

from __future__ import annotations

import pytest

from slurmddp.slurm.limits.accounting import parse_associations, parse_enforced, parse_qualities


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("none", set()),
        ("(null)", set()),
        ("associations", {"associations"}),
        ("safe", {"safe", "limits", "associations"}),
        ("qos", {"qos", "associations"}),
        ("all", {"associations", "limits", "qos", "safe"}),
    ],
)
def test_enforced_words_include_what_they_imply(value: str, words: set[str]) -> None:
    assert parse_enforced(value) == words


def test_limits_are_read_as_slurm_prints_them() -> None:
    qualities = parse_qualities(
        "Hi\nnormal||||\nShort|1-00:00:00|cpu=4,gres/gpu:a100=8,mem=9G,node=1|2|DenyOnLimit,NoReserve\n"
    )
    assert (qualities["normal"].max_wall_min, qualities["normal"].max_tres) == (None, {})
    short = qualities["short"]
    assert (short.max_wall_min, short.max_submit) == (1440, 2)
    assert short.max_tres == {"cpu": 4, "gres/gpu:a100": 8, "node": 1}
    assert short.flags == {"DenyOnLimit", "NoReserve"}


def test_associations_are_read_as_slurm_prints_them() -> None:
    (own,) = parse_associations("root||normal,short||01:00:00|node=2|5\n")
    assert (own.account, own.partition, own.qualities, own.default_qos) == (
        "root",
        "",
        ("normal", "short"),
        "",
    )
    assert (own.limits.max_wall_min, own.limits.max_tres, own.limits.max_submit) == (60, {"node": 2}, 5)
