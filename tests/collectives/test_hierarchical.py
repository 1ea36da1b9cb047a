"""All-reduce within nodes and between them: the sum, equal bits, and few bytes between nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slurmddp.collectives import CountedLink, ThreadLink
from slurmddp.collectives.hierarchical import hierarchical


@pytest.mark.parametrize(("nodes", "each"), [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("length", [0, 1, 5, 24, 25])
def test_c1_the_sum_over_all_ranks_of_all_nodes(nodes: int, each: int, length: int) -> None:
    locals_ = [list(map(CountedLink, ThreadLink.of_threads(each))) for _ in range(nodes)]
    betweens = [list(map(CountedLink, ThreadLink.of_threads(nodes))) for _ in range(each)]
    places = [(node, rank) for node in range(nodes) for rank in range(each)]
    generator = torch.Generator().manual_seed(7)
    flats = [torch.randint(-50, 50, (length,), generator=generator).float() for _ in places]
    whole = torch.stack(flats).sum(0)
    with ThreadPoolExecutor(len(places)) as threads:
        waits = [
            threads.submit(hierarchical, flat, locals_[node][rank], betweens[rank][node])
            for flat, (node, rank) in zip(flats, places, strict=True)
        ]
        for wait in waits:
            wait.result()
    assert all(torch.equal(flat, whole) for flat in flats)
    sent = sum(link.bytes for links in betweens for link in links)
    assert sent == 2 * (nodes - 1) * length * 4, "the bytes between all nodes are those of a ring of nodes"
    assert all(link.messages == 2 * (each - 1) for links in locals_ for link in links)
