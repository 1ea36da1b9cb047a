"""The interface that leads to an address, compared with what psutil reads from the kernel in its own way."""

import socket

import psutil
import pytest

from slurmddp.node.interface import interface_towards, interface_with, source_address


def own_addresses():
    """Return (interface, address) of this machine; link-local ones need a scope and are left out."""
    return {
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def test_every_own_address_is_found_on_its_interface():
    before = own_addresses()
    found = {address: interface_with(address) for _, address in before}
    # Interfaces may come and go on a busy machine; those that stayed were there all the time.
    stayed = before & own_addresses()
    assert ("lo", "127.0.0.1") in stayed
    for address in {address for _, address in stayed}:
        assert found[address] in {name for name, other in before if other == address}


def test_loopback_leads_to_loopback():
    assert interface_towards("127.0.0.1") == "lo"
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_an_address_of_another_net_is_reached_from_an_own_one():
    name = interface_towards("192.0.2.1")
    assert name is None or name in psutil.net_if_addrs()
    assert name != "lo"


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_nobody_here_is_on_no_interface(address):
    assert interface_with(address) is None


def test_what_is_no_address_is_refused():
    with pytest.raises(ValueError, match="not an address"):
        source_address("not an address")
