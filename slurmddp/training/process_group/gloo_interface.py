"""Choose the network interface of gloo: the interface that leads to rank 0's node."""

from __future__ import annotations

import contextlib
import os
import socket

import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError
from slurmddp.host.address import LOOPBACK, find_rank_zero, is_loopback
from slurmddp.host.network_interface import GLOO_VARIABLE, check_named, interface_towards

_FOUND = "slurmddp/found"


def check_interfaces(info: RankInfo, backend: str | None) -> None:
    """Check the network interfaces that environment variables of gloo or NCCL name.

    Raises:
        MismatchError: an interface does not exist on this node, or does not lead to other nodes.
    """
    # Ranks of emulated nodes, and ranks that meet at a loopback address, are all on this machine. Then the
    # loopback interface is right too, as with one node.
    nodes = 1 if info.emulated or is_loopback(info.master_addr or "") else info.nodes
    check_named(os.environ, backend, nodes, [name for _, name in socket.if_nameindex()])


def name_interface(info: RankInfo, store: dist.Store) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface that leads to rank 0's node."""
    address = _address_of_rank_zero(info, store)
    if os.environ.get(GLOO_VARIABLE) or address is None:
        return

    name = interface_towards(address)
    if name is not None:
        os.environ[GLOO_VARIABLE] = name


def _address_of_rank_zero(info: RankInfo, store: dist.Store) -> str | None:
    """Return the IP address of rank 0's node; None if its name (MASTER_ADDR of torchrun) does not resolve.

    Rank 0's node may resolve its own name to a loopback address. Under torchrun, a rank that finds a loopback
    address therefore uses the address that another rank has found and written to the store.
    """
    if info.nodes == 1:
        return LOOPBACK.text
    if info.master_port is None:
        return find_rank_zero(info)[0].text

    address = ""
    with contextlib.suppress(SlurmddpError):
        address = find_rank_zero(info)[0].text

    store.set(f"{_FOUND}/{info.rank}", address)
    if is_loopback(address) and not is_loopback(info.master_addr or ""):
        # `get` raises RuntimeError if a rank has not written its address in time. Then keep the loopback
        # address.
        with contextlib.suppress(RuntimeError):
            addresses = (store.get(f"{_FOUND}/{rank}").decode() for rank in range(info.world_size))
            address = next((text for text in addresses if text and not is_loopback(text)), address)

    return address or None
