"""Connect ranks of several hosts: shared memory within each host, gloo between the hosts.

Backend `hierarchical`. In an all-reduce or a broadcast, all ranks of a host together send no more bytes over
the network than one rank would send if each host had a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import broadcast
from slurmddp.collectives.ring import ring
from slurmddp.errors import ConfigError
from slurmddp.transports.link_group import COMBINE
from slurmddp.transports.node_memory import host_identity
from slurmddp.transports.shared_memory import SharedMemoryLink


class HierarchicalLink:
    """Link between all ranks of all hosts: shared memory within a host, gloo between hosts.

    It implements all-reduce and broadcast itself.

    Args:
        store: the key-value store through which the ranks find each other.
        rank: the rank of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank in an operation.

    Raises:
        ConfigError: the hosts have different numbers of ranks.

    Example:
        link = HierarchicalLink(store, rank, world_size, timedelta(minutes=5))
        link.all_reduce(torch.ones(3), ReduceOp.SUM)
    """

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self._hosts = _ranks_by_host(store, rank, world_size)
        """The ranks of each host."""
        host = self._host_of(rank)
        self._local_ranks = self._hosts[host]
        """The ranks of this host."""
        place = self._local_ranks.index(rank)

        local_store = distributed.PrefixStore(f"host/{host}", store)
        self._local = SharedMemoryLink(local_store, place, len(self._local_ranks), timeout)
        network_store = distributed.PrefixStore("hosts", store)
        group = distributed.ProcessGroupGloo(network_store, rank, world_size, timeout)
        self._network = _GlooLink(group)
        self._between = _SubLink(self._network, [ranks[place] for ranks in self._hosts])
        """A link to those ranks of other hosts that have the same local rank as this rank."""

    def _host_of(self, rank: int) -> int:
        """Return the index of a rank's host in `_hosts`."""
        return next(number for number, ranks in enumerate(self._hosts) if rank in ranks)

    def all_reduce(self, flat: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Reduce a tensor over all ranks, in place; the result has equal bits on all ranks.

        Each host first reduces in its shared memory. Then each rank of a host reduces one share of the result
        with the other hosts, on a ring. At last each host gathers the shares in its shared memory.

        Args:
            flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
            op: `torch.distributed.ReduceOp.SUM`, PRODUCT, MIN, MAX, BAND, BOR or BXOR.

        Returns:
            None. NotImplemented for other reductions, which the caller must then do.
        """
        combine = COMBINE.get(op)
        if combine is None:
            return NotImplemented

        self._local.all_reduce(flat, op)
        if len(self._hosts) > 1:
            shares = chunks(flat, len(self._local_ranks))
            ring(shares[self._local.rank], self._between, combine)
            self._gather_shares(shares)

        return None

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Replace `flat`, which is contiguous and of one dimension, by the tensor of rank `source`."""
        host = self._host_of(source)
        place = self._hosts[host].index(source)
        # On each host, the rank with the same local rank as the source receives over the network.
        if self._local.rank == place:
            broadcast(flat, self._between, host)
        self._local.broadcast(flat, place)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor to rank `to`.

        Return a function that waits until the memory of the tensor may change.
        """
        link, place = self._link_to(to)
        return link.send(tensor, place)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive the next message of `source` into a contiguous tensor of the same shape and dtype."""
        link, place = self._link_to(source)
        link.recv(tensor, place)

    def close(self) -> None:
        """Release the shared memory of this rank, without waiting for other ranks."""
        self._local.close()

    def _link_to(self, rank: int) -> tuple[Link, int]:
        """Return the link to a rank (shared memory or network), and the rank's number on this link."""
        if rank in self._local_ranks:
            return self._local, self._local_ranks.index(rank)
        return self._network, rank

    def _gather_shares(self, shares: Sequence[torch.Tensor]) -> None:
        """Exchange the shares of all ranks of this host, so that each rank has every share.

        Args:
            shares: one share for each local rank; this rank's is set, and the others are filled.
        """
        length = max(map(len, shares))
        share = shares[self._local.rank]
        # Pad the share: an all-gather needs equal lengths, and shares differ by at most one element.
        padded = share
        if len(share) < length:
            padded = torch.cat([share, share.new_zeros(length - len(share))])

        gathered = share.new_empty(length * len(shares))
        self._local.all_gather(gathered, padded)
        for share, row in zip(shares, gathered.view(len(shares), length), strict=True):
            share.copy_(row[: len(share)])


class _GlooLink:
    """Link over a gloo group that is not registered in torch.distributed."""

    def __init__(self, group: distributed.ProcessGroupGloo) -> None:
        self._group: Any = group
        self.rank = group.rank()
        self.world_size = group.size()

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        work: distributed.Work = self._group.send([tensor], to, 0)
        return work.wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._group.recv([tensor], source, 0).wait()


class _SubLink:
    """Link between some of the ranks of another link, which are numbered from 0."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self._link = link
        self._ranks = ranks
        self.rank = ranks.index(link.rank)
        self.world_size = len(ranks)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        return self._link.send(tensor, self._ranks[to])

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._link.recv(tensor, self._ranks[source])


def _host_of_this_rank() -> str:
    """Return a string that identifies the host and the network namespace of this rank.

    With the namespace, ranks on different nodes of the sandbox, which share one machine, count as on
    different hosts.
    """
    return f"{host_identity()}/{Path('/proc/self/ns/net').readlink()}"


def _ranks_by_host(store: distributed.Store, rank: int, world_size: int) -> list[list[int]]:
    """Return the ranks of each host; the hosts are in the order of their first ranks. All ranks must call it.

    Raises:
        ConfigError: the hosts have different numbers of ranks.
    """
    store.set(f"host-of/{rank}", _host_of_this_rank())
    # `get` waits until the other rank has set its host.
    hosts: dict[str, list[int]] = {}
    for other in range(world_size):
        hosts.setdefault(store.get(f"host-of/{other}").decode(), []).append(other)

    counts = [len(ranks) for ranks in hosts.values()]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"backend=hierarchical: the hosts have {', '.join(map(str, counts))} ranks.",
            hint="Start the same number of ranks on each node, or use backend=gloo.",
        )

    return list(hosts.values())
