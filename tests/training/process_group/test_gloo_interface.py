"""The interface for gloo, also under torchrun if rank 0's node resolves its own name to loopback."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.host.address import Address
from slurmddp.training.process_group import gloo_interface

HERE, THERE = "127.0.1.1", "192.0.2.1"


def on_node(node, name="n1"):
    """Return the only rank on one of two nodes that torchrun has started."""
    place = {"rank": node, "node_rank": node, "world_size": 2, "nodes": 2, "hosts": (name,)}
    return RankInfo(environment="torchrun", master_addr=name, master_port=29500, **place)


@pytest.mark.parametrize(
    ("found", "name", "taken"),
    [
        # Debian's installer gives a machine's own name to 127.0.1.1; other machines ask the name server.
        ([HERE, THERE], "n1", [THERE, THERE]),
        ([HERE, HERE], "n1", [HERE, HERE]),
        (["127.0.0.1"] * 2, "127.0.0.1", ["127.0.0.1"] * 2),
        ([HERE, SlurmddpError("no such name", hint="")], "n1", [HERE, None]),
    ],
    ids=["another rank resolves it", "one machine", "a loopback address", "one rank can't resolve it"],
)
def test_two_ranks_take_the_address_that_leads_to_rank_zero(monkeypatch, found, name, taken):
    def find(info):
        if isinstance(found[info.rank], Exception):
            raise found[info.rank]
        return [Address(2, found[info.rank])]

    monkeypatch.setattr(gloo_interface, "find_rank_zero", find)
    ranks, store = [on_node(0, name), on_node(1, name)], dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(gloo_interface._address_of_rank_zero, ranks, [store] * 2)) == taken


def test_the_interface_is_named_for_that_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(gloo_interface, "_address_of_rank_zero", lambda info, store: THERE)
    monkeypatch.setattr(gloo_interface, "interface_towards", lambda text: f"to-{text}")
    gloo_interface.name_interface(on_node(0), dist.HashStore())
    assert os.environ["GLOO_SOCKET_IFNAME"] == f"to-{THERE}"


@pytest.mark.parametrize(("name", "taken"), [("localhost", True), ("127.0.0.1", True), ("n1", False)])
def test_loopback_is_refused_unless_rank_zeros_address_is_loopback(monkeypatch, name, taken):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    refused = (
        contextlib.nullcontext() if taken else pytest.raises(MismatchError, match="loopback does not connect")
    )
    with refused:
        gloo_interface.check_interfaces(on_node(0, name), "gloo")
