"""Which interface gloo is told under torchrun, whose meeting point rank 0's node may take for loopback."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.host.address import Address
from slurmddp.training.process_group import setup

HERE, THERE = "127.0.1.1", "192.0.2.1"


def on_node(node, name="n1", **changes):
    """Return the only rank on one of two nodes that torchrun has started."""
    facts = {"rank": node, "node_rank": node, "world_size": 2, "nodes": 2, "hosts": (name,)}
    known = {"environment": "torchrun", "master_addr": name, "master_port": 29500}
    return RankInfo(**(facts | known | changes))


@pytest.fixture
def meet(monkeypatch):
    """Let two ranks meet that find rank 0's name to be what they are told; return the addresses they take."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(setup, "interface_towards", lambda text: f"to-{text}")

    def run(found, **changes):
        def find(info):
            if isinstance(found[info.rank], Exception):
                raise found[info.rank]
            return [Address(2, found[info.rank])]

        monkeypatch.setattr(setup, "find_rank_zero", find)
        store = dist.HashStore()

        def name_one(node):
            return setup._address_of_rank_zero(on_node(node, **changes), store)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(name_one, (0, 1)))

    return run


def test_rank_zeros_node_takes_the_address_by_which_the_others_know_it(meet):
    # Debian's installer gives a machine's own name to 127.0.1.1; other machines ask the name server.
    assert meet([HERE, THERE]) == [THERE, THERE]


def test_nodes_that_share_a_machine_stay_on_its_loopback(meet):
    assert meet([HERE, HERE]) == [HERE, HERE]
    assert meet(["127.0.0.1", "127.0.0.1"], name="127.0.0.1") == ["127.0.0.1", "127.0.0.1"]


def test_a_name_that_one_rank_does_not_find_holds_up_none(meet):
    error = SlurmddpError("no such name", hint="")
    assert meet([HERE, error]) == [HERE, None]


def test_the_interface_is_named_for_that_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(setup, "_address_of_rank_zero", lambda info, store: THERE)
    monkeypatch.setattr(setup, "interface_towards", lambda text: f"to-{text}")
    with contextlib.ExitStack() as undo:
        place = setup.RankContext(on_node(0), setup.torch.device("cpu"), "gloo", None, undo)
        setup._name_interface(place, dist.HashStore())
        assert os.environ["GLOO_SOCKET_IFNAME"] == f"to-{THERE}"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("name", "taken"), [("localhost", True), ("127.0.0.1", True), ("n1", False)])
def test_loopback_is_refused_unless_the_meeting_point_is_loopback_by_its_name(monkeypatch, name, taken):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    refused = contextlib.nullcontext() if taken else pytest.raises(MismatchError, match="loopback leads to")
    with contextlib.ExitStack() as undo, refused:
        place = setup.RankContext(on_node(0, name), setup.torch.device("cpu"), "gloo", None, undo)
        setup._check_interfaces(place)
