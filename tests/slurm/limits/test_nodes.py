"""The nodes of a site, as sinfo prints them."""

from __future__ import annotations

import pytest

from slurmddp.slurm.limits.nodes import gib, parse_gpus, parse_groups
from support.slurm.sites import NODES


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("", ()),
        ("gpu", (("", 1),)),
        ("gpu:2", (("", 2),)),
        ("gpu:a100:8(S:0-1)", (("a100", 8),)),
        ("gpu:a100:4(S:0-1),gpu:h100:2(IDX:0,3)", (("a100", 4), ("h100", 2))),
        ("nvme:1,gpu:4", (("", 4),)),
        ("gpu:a100_3g.20gb:4", (("a100_3g.20gb", 4),)),
        ("gpu:4090:2", (("4090", 2),)),
        ("gpu:v100:no_consume:2,craynetwork:4", (("v100", 2),)),
        ("mygpu:3", ()),
    ],
)
def test_gpus_are_read_from_every_form_of_gres(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert parse_gpus(gres) == gpus


def test_groups_are_read_from_sinfo_and_banners_are_not() -> None:
    first, second, third, *_ = parse_groups(NODES)
    assert len(parse_groups(NODES)) == NODES.count("\n") - 1
    assert (first.partition, first.nodes, first.cpus, first.memory_mb) == ("gpu", 4, 128, 1031000)
    assert (first.sockets, first.cores_per_socket, first.features) == (2, 32, ("a100", "ib"))
    assert (first.gres, second.gres, third.gres) == ("gpu:a100:8", "gpu:v100:4", "")
    assert (third.features, third.state) == ((), "idle")


def test_memory_is_rounded_down() -> None:
    assert (gib(1031000), gib(24105), gib(1024)) == ("1006.8", "23.5", "1")
