"""The interface that leads to an address, compared with the interfaces that psutil lists."""

import socket

import psutil
import pytest

from slurmddp.errors import MismatchError
from slurmddp.host.network_interface import check_named, interface_towards, interface_with, nccl_choice


def own_addresses():
    """Return each (interface, address) of this machine, without link-local addresses, which need a scope."""
    return {
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def test_every_own_address_is_found_on_its_interface():
    before = own_addresses()
    interfaces = {address: interface_with(address) for _, address in before}
    # Interfaces may come and go on a busy machine; the test uses those that exist before and after.
    stayed = before & own_addresses()
    assert ("lo", "127.0.0.1") in stayed
    for address in {address for _, address in stayed}:
        assert interfaces[address] in {name for name, other in before if other == address}


def test_loopback_leads_to_loopback():
    assert interface_towards("127.0.0.1") == "lo"


def test_an_address_of_another_net_is_reached_from_an_own_one():
    name = interface_towards("192.0.2.1")
    assert name is None or name in psutil.net_if_addrs()
    assert name != "lo"


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_nobody_here_is_on_no_interface(address):
    assert interface_with(address) is None


HERE = ["lo", "eth0", "ib0", "ib1", "docker0"]


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("", []),
        ("eth0", ["eth0"]),
        ("ib", ["ib0", "ib1"]),
        ("ens,ib1", ["ib1"]),
        ("=ib", []),
        ("=ib0,eth0", ["eth0", "ib0"]),
        ("^docker,lo", ["eth0", "ib0", "ib1"]),
        ("^=ib0", ["docker0", "eth0", "ib1", "lo"]),
        ("^lo,eth,ib,docker", []),
    ],
)
def test_nccl_takes_interfaces_by_their_prefix(asked, chosen):
    assert nccl_choice(asked, HERE) == chosen


@pytest.mark.parametrize(
    ("environ", "backend", "nodes"),
    [
        ({}, "nccl", 4),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "gloo", 4),
        ({"GLOO_SOCKET_IFNAME": "eth0, ib0"}, "nccl", 4),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "gloo", 1),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, "nccl", 4),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "nccl", 1),
        ({"NCCL_SOCKET_IFNAME": "bond0"}, "gloo", 4),  # set for GPU nodes, and not read on this one
    ],
)
def test_interfaces_that_can_be_right_are_left_to_the_person(environ, backend, nodes):
    check_named(environ, backend, nodes, HERE)


@pytest.mark.parametrize(
    ("variable", "value", "nodes", "reason"),
    [
        ("GLOO_SOCKET_IFNAME", "eth1", 1, "there is no eth1"),
        ("GLOO_SOCKET_IFNAME", "eth0,bond0", 2, "there is no bond0"),
        ("GLOO_SOCKET_IFNAME", "lo", 2, "the ranks are on 2 nodes, which loopback does not connect"),
        ("NCCL_SOCKET_IFNAME", "bond", 1, "it fits no interface"),
        ("NCCL_SOCKET_IFNAME", "=ib", 2, "it fits no interface"),
        ("NCCL_SOCKET_IFNAME", "lo", 2, "the ranks are on 2 nodes, which loopback does not connect"),
    ],
)
def test_interfaces_that_are_wrong_are_refused_with_those_that_there_are(variable, value, nodes, reason):
    with pytest.raises(MismatchError, match=reason) as caught:
        check_named({variable: value}, "nccl", nodes, HERE)
    assert f"{variable}={value!r} can't be used on" in caught.value.message
    assert "docker0, eth0, ib0, ib1, lo" in caught.value.hint
