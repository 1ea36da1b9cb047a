"""The address of rank 0. The resolver is replaced, because names differ between machines."""

import dataclasses
import errno
import socket

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.host import address
from slurmddp.host.address import LOOPBACK, find_rank_zero

TWO_NODES = RankInfo(
    environment="slurm", rank=1, node_rank=1, world_size=2, nodes=2, hosts=("n1", "n2"), launch_id="1.0.0"
)


@pytest.fixture
def names(monkeypatch):
    """A resolver that knows the names in this dict. A value is a list of addresses, or an error to raise."""
    table = {}

    def getaddrinfo(host, port, **options):
        record = table.get(host, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        if isinstance(record, Exception):
            raise record
        families = [socket.AF_INET6 if ":" in text else socket.AF_INET for text in record]
        return [(family, 1, 6, "", (text, 0)) for family, text in zip(families, record, strict=True)]

    monkeypatch.setattr(address.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(address, "_RETRY_S", 0.0)
    return table


def texts(info):
    return [record.text for record in find_rank_zero(info)]


LOOPBACK_AND_REAL = ["127.0.1.1", "10.0.0.1"]


@pytest.mark.parametrize(
    ("changes", "resolved", "expected"),
    [
        ({}, ["2001:db8::1", "10.0.0.1", "10.0.0.1", "10.1.0.1"], ["10.0.0.1", "10.1.0.1", "2001:db8::1"]),
        ({}, LOOPBACK_AND_REAL, ["10.0.0.1"]),
        ({"master_addr": "n1"}, LOOPBACK_AND_REAL, ["10.0.0.1"]),
        ({"master_addr": "127.0.0.1"}, ["127.0.0.1"], ["127.0.0.1"]),
        # A person sets a name that means this machine on every node.
        ({"master_addr": "localhost"}, ["::1", "127.0.0.1"], ["127.0.0.1", "::1"]),
        # torchrun itself listens there, on all addresses.
        ({"master_addr": "n1", "master_port": 29500}, ["127.0.1.1"], ["127.0.1.1"]),
        ({"master_addr": "n1", "master_port": 29500}, LOOPBACK_AND_REAL, ["10.0.0.1"]),
    ],
)
def test_addresses_of_a_name_ipv4_first_and_without_loopback(names, changes, resolved, expected):
    names[changes.get("master_addr", "n1")] = resolved
    assert texts(dataclasses.replace(TWO_NODES, **changes)) == expected


# With `SLURMDDP_MASTER_ADDR=$(hostname)` on a machine whose own name is 127.0.1.1, no rank could connect.
@pytest.mark.parametrize("given", [None, "n1"])
@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.1.1", "::1"])
def test_t12_loopback_with_several_nodes_is_refused(names, text, given):
    names["n1"] = [text]
    with pytest.raises(MismatchError) as caught:
        find_rank_zero(dataclasses.replace(TWO_NODES, master_addr=given))
    assert "2 nodes" in caught.value.message
    assert f"'n1', is {text}" in caught.value.message
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint


def test_a_name_that_does_not_resolve_is_named(names):
    with pytest.raises(MismatchError, match="'n1', does not resolve") as caught:
        find_rank_zero(TWO_NODES)
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint


@pytest.mark.parametrize("name", ["1720.30.23.101", "10.0.0.256", "10.0.0.1.2"])
def test_t12_a_malformed_address_is_refused_at_once_whatever_a_name_server_says(names, name):
    names[name] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(MismatchError, match="is not an IPv4 address"):
        find_rank_zero(dataclasses.replace(TWO_NODES, master_addr=name))


def test_a_name_server_that_is_down_is_no_wrong_value(names):
    names["n1"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(SlurmddpError, match="does not resolve") as caught:
        find_rank_zero(TWO_NODES)
    assert not isinstance(caught.value, MismatchError)


def test_a_name_server_that_recovers_is_asked_again(names, monkeypatch):
    names["n1"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    monkeypatch.setattr(address, "_RETRY_S", 60.0)
    monkeypatch.setattr(address.time, "sleep", lambda _: names.update(n1=["10.0.0.1"]))
    assert texts(TWO_NODES) == ["10.0.0.1"]


def test_a_name_too_long_for_dns_is_an_error_to_read(monkeypatch):
    info = dataclasses.replace(TWO_NODES, hosts=("n" * 70 + ".example",))
    monkeypatch.setattr(address, "_RETRY_S", 0.0)
    with pytest.raises(SlurmddpError, match="does not resolve"):
        find_rank_zero(info)


@pytest.mark.parametrize("changes", [{"emulated": True}, {"nodes": 1}], ids=["emulated", "one node"])
def test_ranks_on_one_machine_need_no_name(names, changes):
    assert find_rank_zero(dataclasses.replace(TWO_NODES, **changes)) == [LOOPBACK]


@pytest.fixture
def without_ipv6(monkeypatch):
    """A kernel that was started with `ipv6.disable=1`; the resolver still returns IPv6 addresses."""
    kinds = socket.socket

    def refuse(family=socket.AF_INET, *args, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return kinds(family, *args, **options)

    monkeypatch.setattr(address.socket, "socket", refuse)


def test_addresses_that_this_kernel_can_not_use_are_left_out(names, without_ipv6):
    names["n1"] = ["2001:db8::1", "10.0.0.1"]
    assert texts(TWO_NODES) == ["10.0.0.1"]


def test_a_name_with_no_address_that_this_kernel_can_use_is_said(names, without_ipv6):
    names["n1"] = ["2001:db8::1"]
    with pytest.raises(MismatchError, match=r"'n1'.*2001:db8::1") as caught:
        find_rank_zero(TWO_NODES)
    assert "SLURMDDP_MASTER_ADDR" in caught.value.hint
