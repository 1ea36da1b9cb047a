"""Exchange known numbers between pairs of nodes, and sum known numbers over all ranks.

In each round a node has at most one partner, so that a silent node delays no third node.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import distributed

from slurmddp.environments.rank_info import RankInfo
from slurmddp.short_text import first_line
from slurmddp.training.preflight.timeout import within

Pair = tuple[int, int]

_ALL_PAIRS_UP_TO = 8
"""Up to this number of nodes, all pairs exchange numbers."""
_NUMBERS = 1024
"""The length of the exchanged vector."""
_RANKS = 97
"""Ranks with the same remainder by this prime send the same vector."""


def rounds(nodes: int) -> list[list[Pair]]:
    """Return the pairs of each round: all pairs of few nodes, else the neighbours in a hypercube.

    In a hypercube each node is in several pairs, so that a node which fails in all its pairs stands out.
    """
    if nodes <= _ALL_PAIRS_UP_TO:
        return _round_robin(nodes)

    pairs_by_round = []
    for dimension in range((nodes - 1).bit_length()):
        bit = 1 << dimension
        pairs_by_round.append([(a, a | bit) for a in range(nodes) if not a & bit and a | bit < nodes])

    return pairs_by_round


def _round_robin(nodes: int) -> list[list[Pair]]:
    """Pair each node with each other node once, by the circle method of round-robin tournaments."""
    # An odd number of nodes gets an empty seat: whoever faces it pauses for a round.
    seats = list(range(nodes + nodes % 2))
    half = len(seats) // 2
    pairs_by_round = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs_by_round.append([(min(pair), max(pair)) for pair in facing if max(pair) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]

    return pairs_by_round


def check_pairs(info: RankInfo, device: torch.device, pair_s: float) -> dict[Pair, str]:
    """Exchange numbers with the partner of each round; return the failed pairs of this node with reasons.

    Only local rank 0 takes part. Round n ends at the latest n times `pair_s` seconds after the first start.
    """
    began = time.monotonic()
    failed: dict[Pair, str] = {}
    for number, pairs in enumerate(rounds(info.nodes), 1):
        pair = next((pair for pair in pairs if info.node_rank in pair), None)
        if info.local_rank != 0 or pair is None:
            continue

        peer = (pair[0] + pair[1] - info.node_rank) * info.local_world_size
        deadline = began + number * pair_s
        reason = _failure(partial(exchange, peer, device), deadline - time.monotonic(), device)
        if reason is not None:
            failed[pair] = reason

    return failed


def check_sum(device: torch.device, timeout_s: float) -> str | None:
    """Sum a known vector over all ranks; return the reason if that failed, or None."""
    return _failure(partial(reduce_all, device), timeout_s, device)


def _failure(action: partial[str | None], timeout_s: float, device: torch.device) -> str | None:
    """Run an action within a time limit; return the reason of its failure, or None."""
    try:
        return within(timeout_s, action, device)
    except (RuntimeError, TimeoutError) as error:
        return first_line(error)


def faulty_nodes(failed: Iterable[Pair], suspects: Collection[int] = ()) -> list[int]:
    """Return few nodes that explain all failed pairs, the nodes in most pairs first.

    This is the greedy vertex cover. If two nodes failed only with each other, the suspect is chosen. Without
    a suspect, the node of the higher rank is chosen: nothing shows which of them is faulty.
    """
    unexplained = set(failed)
    nodes: list[int] = []
    while unexplained:
        counts = Counter(node for pair in unexplained for node in pair)
        worst = max(counts, key=lambda node: (counts[node], node in suspects, node))
        nodes.append(worst)
        unexplained = {pair for pair in unexplained if worst not in pair}

    return nodes


def describe(
    node: int, failed: Mapping[Pair, str], names: Sequence[str], suspects: Collection[int] = ()
) -> str:
    """Return a sentence that names the nodes with which `node` did not exchange data, and the reason."""
    reasons = {(b if a == node else a): why for (a, b), why in failed.items() if node in (a, b)}
    others = ", ".join(names[other] for other in reasons)
    text = f"it does not exchange data with {others}: {next(iter(reasons.values()))}."
    if node in suspects:
        return f"{text} Before, it failed with another node."

    # If both nodes of a pair failed with no other node, either may be faulty.
    peer = next(iter(reasons))
    if len(reasons) == 1 and sum(peer in pair for pair in failed) == 1:
        return f"{text} It may be {others} as well."
    return text


def exchange(peer: int, device: torch.device) -> str | None:
    """Exchange known vectors with rank `peer`; return what was wrong with the received vector, or None."""
    sent = _vector(distributed.get_rank(), device)
    received = torch.empty_like(sent)
    operations = [
        distributed.P2POp(distributed.isend, sent, peer),
        distributed.P2POp(distributed.irecv, received, peer),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()

    if torch.equal(received, _vector(peer, device)):
        return None
    return "other numbers came than were sent"


def reduce_all(device: torch.device) -> str | None:
    """Sum a known vector over all ranks; return what was wrong with the sum, or None."""
    total = _vector(distributed.get_rank(), device)
    distributed.all_reduce(total)
    ranks = distributed.get_world_size()
    expected = _vector(0, device) * ranks + sum(rank % _RANKS for rank in range(ranks))
    if torch.equal(total, expected):
        return None
    return "the sum over all ranks is wrong"


def _vector(rank: int, device: torch.device) -> torch.Tensor:
    """Return float64 whole numbers so small that every order of summation gives the same bits."""
    return (torch.arange(_NUMBERS, device=device) % 61 + rank % _RANKS).double()
