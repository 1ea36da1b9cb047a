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
        "Hi\nnormal|||||\n"
        "Short|1-00:00:00|cpu=4,gres/gpu:a100=8,mem=9G,node=1|2|cpu=64|DenyOnLimit,NoReserve\n"
    )
    assert (qualities["normal"].max_wall_min, qualities["normal"].max_tres) == (None, {})
    short = qualities["short"]
    assert (short.max_wall_min, short.max_submit) == (1440, 2)
    assert short.max_tres == {"cpu": 4, "gres/gpu:a100": 8, "node": 1}
    assert short.grp_tres == {"cpu": (64, "QOS 'Short'")}
    assert short.flags == {"DenyOnLimit", "NoReserve"}


def test_associations_are_read_as_slurm_prints_them() -> None:
    (own,) = parse_associations("root||normal,short||01:00:00|node=2|5|\n")
    assert (own.account, own.partition, own.qualities, own.default_qos) == (
        "root",
        "",
        ("normal", "short"),
        "",
    )
    assert (own.limits.max_wall_min, own.limits.max_tres, own.limits.max_submit) == (60, {"node": 2}, 5)


def test_an_account_shares_the_limits_of_all_accounts_above_it() -> None:
    accounts = "root|||\nphysics||root|cpu=64,node=4\nstrings||physics|cpu=96\nstrings|ann|physics|cpu=1\n"
    (own,) = parse_associations("Strings||normal|||||node=9\n", accounts)
    above = "account 'physics'"
    assert own.limits.grp_tres == {"cpu": (64, above), "node": (4, above)}
    (apart,) = parse_associations("loop||normal|||||\n", "loop||loop|cpu=2\n")
    assert apart.limits.grp_tres == {"cpu": (2, "account 'loop'")}
