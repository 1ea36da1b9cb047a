"""Collectives over shared memory in each host and gloo between hosts; a thread is a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from slurmddp.errors import ConfigError
from slurmddp.transports import hierarchical_link, shared_memory
from slurmddp.transports.hierarchical_link import HierarchicalLink
from slurmddp.transports.link_group import LinkGroup
from support.distributed import collective_jobs

HOSTS = ("aa", "ab", "aabb", "abab", "aaabbb", "aabbcc")
"""A letter for the host of each rank."""


def on_threads(
    function: Callable[[HierarchicalLink], Any], hosts: str, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the results of all ranks."""
    store, place = HashStore(), threading.local()
    monkeypatch.setattr(hierarchical_link, "_host_of_this_rank", lambda: hosts[place.rank])

    def run(rank: int) -> Any:
        place.rank = rank
        return function(HierarchicalLink(store, rank, len(hosts), timedelta(seconds=60)))

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(run, range(len(hosts))))


@pytest.mark.parametrize("hosts", HOSTS)
def test_c1_reductions_of_every_type_and_length(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors longer than three slots are then short, and each slot is still reduced by shares.
    monkeypatch.setattr(shared_memory, "SET_BYTES", 4 * shared_memory.WHOLE_BYTES)

    def wrong(link: HierarchicalLink) -> list[str]:
        return collective_jobs.wrong_reductions(link, link._local._slot_bytes)

    assert on_threads(wrong, hosts, monkeypatch) == [[]] * len(hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_rank_broadcasts_and_sends_to_all_others(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(link: HierarchicalLink) -> list[str]:
        found, ranks = [], range(link.world_size)
        for source in ranks:
            value = torch.full((5,), float(link.rank))
            link.broadcast(value, source)
            found += [] if torch.equal(value, torch.full((5,), float(source))) else [f"broadcast {source}"]
        waits = [link.send(torch.tensor([link.rank, to]), to) for to in ranks if to != link.rank]
        for source in [rank for rank in ranks if rank != link.rank]:
            link.recv(got := torch.zeros(2, dtype=torch.int64), source)
            found += [] if got.tolist() == [source, link.rank] else [f"message of {source}"]
        for wait in waits:
            wait()
        group = LinkGroup(link)
        parts = [torch.zeros(3) for _ in ranks]
        group.allgather([parts], [torch.full((3,), float(link.rank))]).wait()
        found += [] if [part[0].item() for part in parts] == list(ranks) else ["all_gather"]
        group.barrier().wait()
        return found

    assert on_threads(wrong, hosts, monkeypatch) == [[]] * len(hosts)


def test_the_network_carries_each_element_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(link: HierarchicalLink) -> int:
        network, count = link._network, 0
        really = network.send

        def counting(tensor: torch.Tensor, to: int) -> Any:
            nonlocal count
            count += tensor.numel()
            return really(tensor, to)

        monkeypatch.setattr(network, "send", counting)
        link.all_reduce(torch.ones(1200))
        return count

    # A ring of 2 hosts sends 2(2-1)/2 of a tensor from each host; 3 ranks of a host share it.
    assert on_threads(sent, "aaabbb", monkeypatch) == [400] * 6


def test_hosts_with_different_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the hosts have 2, 1 ranks"):
        on_threads(lambda link: None, "aab", monkeypatch)
