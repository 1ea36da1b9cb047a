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
    """Raise MismatchError if the user has named an interface that can't lead to the other ranks."""
    # Emulated nodes meet on the loopback of this machine.
    nodes = 1 if info.emulated or is_loopback(info.master_addr or "") else info.nodes
    check_named(os.environ, backend, nodes, [name for _, name in socket.if_nameindex()])


def name_interface(info: RankInfo, store: dist.Store) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0's node, unless the user has set it."""
    address = _address_of_rank_zero(info, store)
    if os.environ.get(GLOO_VARIABLE) or address is None:
        return

    name = interface_towards(address)
    if name is not None:
        os.environ[GLOO_VARIABLE] = name


def _address_of_rank_zero(info: RankInfo, store: dist.Store) -> str | None:
    """Return the address of rank 0's node; None if torchrun's name for the node no longer resolves.

    Under torchrun, rank 0's node may resolve its own name to loopback. The ranks there then take the address
    that another rank has found.
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
        # If a rank does not answer in time, keep the loopback address.
        with contextlib.suppress(RuntimeError):
            addresses = (store.get(f"{_FOUND}/{rank}").decode() for rank in range(info.world_size))
            address = next((text for text in addresses if text and not is_loopback(text)), address)

    return address or None
