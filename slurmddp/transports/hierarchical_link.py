"""The transport for ranks of several hosts: shared memory within each host, gloo between them.

Backend `hierarchical`. All ranks of a host together send as much of an all-reduce or a broadcast over the
network as one rank would.
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
    """A link between all ranks of all hosts, with an all-reduce and a broadcast of its own.

    Args:
        store: by which the ranks find each other.
        rank: of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.

    Raises:
        ConfigError: the hosts have different numbers of ranks.

    Example:
        link = HierarchicalLink(store, rank, world_size, timedelta(minutes=5))
        link.all_reduce(torch.ones(3), ReduceOp.SUM)
    """

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank, self.world_size = rank, world_size
        self._hosts = _ranks_by_host(store, rank, world_size)
        """The ranks of each host."""
        number = next(at for at, ranks in enumerate(self._hosts) if rank in ranks)
        self._here = self._hosts[number]
        place = self._here.index(rank)
        local = distributed.PrefixStore(f"host/{number}", store)
        self._local = SharedMemoryLink(local, place, len(self._here), timeout)
        group = distributed.ProcessGroupGloo(
            distributed.PrefixStore("hosts", store), rank, world_size, timeout
        )
        self._network = _GlooLink(group)
        self._between = _Part(self._network, [ranks[place] for ranks in self._hosts])
        """The ranks of all hosts that have this rank's place on their host."""

    def all_reduce(self, flat: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Reduce in place; all ranks end with equal bits.

        Each host reduces in its memory. Each of its ranks then reduces one share with the other hosts, on a
        ring, and the shares are gathered in the memory of each host.

        Args:
            flat: contiguous, of one dimension, of equal length and dtype on all ranks.
            op: `torch.distributed.ReduceOp.SUM`, PRODUCT, MIN, MAX, BAND, BOR or BXOR.

        Returns:
            NotImplemented for another reduction, else None.
        """
        combine = COMBINE.get(op)
        if combine is None:
            return NotImplemented
        self._local.all_reduce(flat, op)
        if len(self._hosts) > 1:
            shares = chunks(flat, len(self._here))
            ring(shares[self._local.rank], self._between, combine)
            self._gather_shares(shares)
        return None

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor of one dimension with the tensor of rank `source`."""
        host = next(at for at, ranks in enumerate(self._hosts) if source in ranks)
        place = self._hosts[host].index(source)
        if self._local.rank == place:
            broadcast(flat, self._between, host)
        self._local.broadcast(flat, place)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor; return a function that waits until its memory may change."""
        link, place = self._way(to)
        return link.send(tensor, place)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor, of the sent shape and dtype, with the next message of `source`."""
        link, place = self._way(source)
        link.recv(tensor, place)

    def close(self) -> None:
        """Release what the link holds; the ranks need not call it together."""
        self._local.close()

    def _way(self, rank: int) -> tuple[Link, int]:
        """Return the link to a rank, and the rank's number on this link."""
        return (self._local, self._here.index(rank)) if rank in self._here else (self._network, rank)

    def _gather_shares(self, shares: Sequence[torch.Tensor]) -> None:
        """Give all shares to all ranks of this host. Shares differ by one element at most."""
        widest = max(map(len, shares))
        own = shares[self._local.rank]
        padded = own if len(own) == widest else torch.cat([own, own.new_zeros(widest - len(own))])
        whole = own.new_empty(widest * len(shares))
        self._local.all_gather(whole, padded)
        for share, found in zip(shares, whole.view(len(shares), widest), strict=True):
            share.copy_(found[: len(share)])


class _GlooLink:
    """Messages over a group of gloo that torch.distributed does not know."""

    def __init__(self, group: distributed.ProcessGroupGloo) -> None:
        self._group: Any = group
        self.rank, self.world_size = group.rank(), group.size()

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        work: distributed.Work = self._group.send([tensor], to, 0)
        return work.wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._group.recv([tensor], source, 0).wait()


class _Part:
    """Some ranks of a link as a link of their own."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self._link, self._ranks = link, ranks
        self.rank, self.world_size = ranks.index(link.rank), len(ranks)

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
    hosts: dict[str, list[int]] = {}
    for other in range(world_size):
        hosts.setdefault(store.get(f"host-of/{other}").decode(), []).append(other)
    found = list(hosts.values())
    if len({len(ranks) for ranks in found}) > 1:
        raise ConfigError(
            f"backend=hierarchical: the hosts have {', '.join(str(len(ranks)) for ranks in found)} ranks.",
            hint="Give all nodes equally many ranks, or use backend=gloo.",
        )
    return found
