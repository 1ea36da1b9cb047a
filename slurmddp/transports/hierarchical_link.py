"""Connect ranks of several hosts: shared memory within each host, gloo between the hosts.

Backend `hierarchical`. In an all-reduce or a broadcast, all ranks of a host together send as many bytes over
the network as a single rank would send.
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
    """A link between all ranks of all hosts that implements all-reduce and broadcast itself.

    Args:
        store: the store by which the ranks find each other.
        rank: the rank of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.

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
        """A link to the ranks of all hosts that have this rank's place on their host."""

    def _host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(number for number, ranks in enumerate(self._hosts) if rank in ranks)

    def all_reduce(self, flat: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Reduce a tensor in place; all ranks end with equal bits.

        Each host reduces in its shared memory. Each rank of a host then reduces one share with the other
        hosts, on a ring. The shares are gathered in the shared memory of each host.

        Args:
            flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
            op: `torch.distributed.ReduceOp.SUM`, PRODUCT, MIN, MAX, BAND, BOR or BXOR.

        Returns:
            None; NotImplemented for another reduction.
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
        """Fill a contiguous tensor of one dimension with the tensor of rank `source`."""
        host = self._host_of(source)
        place = self._hosts[host].index(source)
        # On each host, the rank at the source's place receives over the network.
        if self._local.rank == place:
            broadcast(flat, self._between, host)
        self._local.broadcast(flat, place)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor; return a function that waits until its memory may change."""
        link, place = self._link_to(to)
        return link.send(tensor, place)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor, of the sent shape and dtype, with the next message of `source`."""
        link, place = self._link_to(source)
        link.recv(tensor, place)

    def close(self) -> None:
        """Release the shared memory; the ranks need not call it together."""
        self._local.close()

    def _link_to(self, rank: int) -> tuple[Link, int]:
        """Return the link to a rank, and the rank's number on this link."""
        if rank in self._local_ranks:
            return self._local, self._local_ranks.index(rank)
        return self._network, rank

    def _gather_shares(self, shares: Sequence[torch.Tensor]) -> None:
        """Gather the shares of all ranks of this host on each of them."""
        length = max(map(len, shares))
        share = shares[self._local.rank]
        # Lengths differ by one element at most, and an all-gather needs equal lengths.
        padded = share
        if len(share) < length:
            padded = torch.cat([share, share.new_zeros(length - len(share))])

        gathered = share.new_empty(length * len(shares))
        self._local.all_gather(gathered, padded)
        for share, row in zip(shares, gathered.view(len(shares), length), strict=True):
            share.copy_(row[: len(share)])


class _GlooLink:
    """Messages over a group of gloo that torch.distributed does not know."""

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
    """A link between some ranks of another link."""

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
    """Return a text that is equal for two ranks of one host.

    Ranks in different network namespaces, such as nodes of the sandbox, count as ranks of different hosts.
    """
    return f"{host_identity()}/{Path('/proc/self/ns/net').readlink()}"


def _ranks_by_host(store: distributed.Store, rank: int, world_size: int) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks; all ranks call it."""
    store.set(f"host-of/{rank}", _host_of_this_rank())
    # `get` waits until the other rank has set its host.
    hosts: dict[str, list[int]] = {}
    for other in range(world_size):
        hosts.setdefault(store.get(f"host-of/{other}").decode(), []).append(other)

    counts = [len(ranks) for ranks in hosts.values()]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"backend=hierarchical: the hosts have {', '.join(map(str, counts))} ranks.",
            hint="Give all nodes equally many ranks, or use backend=gloo.",
        )

    return list(hosts.values())
