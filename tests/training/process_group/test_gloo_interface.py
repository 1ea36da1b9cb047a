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


def on_node(node, name="n1", **changes):
    """Return the only rank on one of two nodes that torchrun has started."""
    facts = {"rank": node, "node_rank": node, "world_size": 2, "nodes": 2, "hosts": (name,)}
    known = {"environment": "torchrun", "master_addr": name, "master_port": 29500}
    return RankInfo(**(facts | known | changes))


@pytest.fixture
def meet(monkeypatch):
    """Give two ranks the address to which rank 0's name resolves on each; return the addresses they take."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(gloo_interface, "interface_towards", lambda text: f"to-{text}")

    def run(found, **changes):
        def find(info):
            if isinstance(found[info.rank], Exception):
                raise found[info.rank]
            return [Address(2, found[info.rank])]

        monkeypatch.setattr(gloo_interface, "find_rank_zero", find)
        store = dist.HashStore()

        def name_one(node):
            return gloo_interface._address_of_rank_zero(on_node(node, **changes), store)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(name_one, (0, 1)))

    return run


def test_rank_zeros_node_takes_the_address_that_other_ranks_resolve(meet):
    # Debian's installer gives a machine's own name to 127.0.1.1; other machines ask the name server.
    assert meet([HERE, THERE]) == [THERE, THERE]


def test_nodes_that_share_a_machine_stay_on_its_loopback(meet):
    assert meet([HERE, HERE]) == [HERE, HERE]
    assert meet(["127.0.0.1", "127.0.0.1"], name="127.0.0.1") == ["127.0.0.1", "127.0.0.1"]


def test_a_name_that_one_rank_can_not_resolve_delays_no_rank(meet):
    error = SlurmddpError("no such name", hint="")
    assert meet([HERE, error]) == [HERE, None]


def test_the_interface_is_named_for_that_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(gloo_interface, "_address_of_rank_zero", lambda info, store: THERE)
    monkeypatch.setattr(gloo_interface, "interface_towards", lambda text: f"to-{text}")
    gloo_interface.name_interface(on_node(0), dist.HashStore())
    assert os.environ["GLOO_SOCKET_IFNAME"] == f"to-{THERE}"


@pytest.mark.parametrize(("name", "taken"), [("localhost", True), ("127.0.0.1", True), ("n1", False)])
def test_loopback_is_refused_unless_rank_zeros_address_is_loopback(monkeypatch, name, taken):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    refused = contextlib.nullcontext() if taken else pytest.raises(MismatchError, match="loopback leads to")
    with refused:
        gloo_interface.check_interfaces(on_node(0, name), "gloo")
