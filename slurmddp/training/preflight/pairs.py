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

from slurmddp.collectives.link import copied_devices
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
    """Return, for each round, the pairs of nodes that exchange numbers.

    With up to 8 nodes, each node meets each other node. With more nodes, each node meets its neighbours in a
    hypercube: about log2(nodes) other nodes. So a faulty node fails with several partners, which shows that
    it is the cause.
    """
    if nodes <= _ALL_PAIRS_UP_TO:
        return _round_robin(nodes)

    pairs_by_round = []
    for dimension in range((nodes - 1).bit_length()):
        bit = 1 << dimension
        pairs_by_round.append([(a, a | bit) for a in range(nodes) if not a & bit and a | bit < nodes])

    return pairs_by_round


def _round_robin(nodes: int) -> list[list[Pair]]:
    """Return the pairs of each round so that each node meets each other node once.

    This is the circle method of round-robin tournaments.
    """
    # If the number of nodes is odd, add an empty seat: the node that faces it has no partner in that round.
    seats = list(range(nodes + nodes % 2))
    half = len(seats) // 2
    pairs_by_round = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs_by_round.append([(min(pair), max(pair)) for pair in facing if max(pair) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]

    return pairs_by_round


def check_pairs(info: RankInfo, device: torch.device, pair_s: float) -> dict[Pair, str]:
    """Exchange numbers with this node's partner in each round.

    Only local rank 0 takes part. Round n ends at the latest n times `pair_s` seconds after the call.

    Returns:
        The pairs of this node whose exchange failed, each with the reason. Empty on other local ranks.
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
    """Sum known vectors over all ranks; return why the sum failed or is wrong, else None."""
    return _failure(partial(reduce_all, device), timeout_s, device)


def _failure(action: partial[str | None], timeout_s: float, device: torch.device) -> str | None:
    """Run `action` with a time limit; return its result, or the error that it raises as a text.

    The result is None if all is well.
    """
    try:
        return within(timeout_s, action, device)
    except (RuntimeError, TimeoutError) as error:
        return first_line(error)


def faulty_nodes(failed: Iterable[Pair], suspects: Collection[int] = ()) -> list[int]:
    """Return a small set of nodes such that each failed pair contains one of them.

    This is a greedy vertex cover: the node in most pairs is taken first. If two nodes failed only with each
    other, nothing shows which one is faulty. Then the node in `suspects` is taken, else the higher node rank.
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
    """Return the text of a finding about `node`: with which nodes its exchange failed, and why.

    Args:
        node: the node rank.
        failed: all failed pairs with their reasons.
        names: the names of all nodes, by node rank.
        suspects: nodes that already failed in an earlier preflight of this attempt.
    """
    reasons = {(b if a == node else a): why for (a, b), why in failed.items() if node in (a, b)}
    others = ", ".join(names[other] for other in reasons)
    text = f"it does not exchange data with {others}: {next(iter(reasons.values()))}."
    if node in suspects:
        return f"{text} In an earlier preflight of this attempt, it failed with another node."

    # If neither node of the pair failed with a third node, the partner may be the faulty one.
    peer = next(iter(reasons))
    if len(reasons) == 1 and sum(peer in pair for pair in failed) == 1:
        return f"{text} The faulty node may also be {others}."
    return text


def exchange(peer: int, device: torch.device) -> str | None:
    """Exchange known vectors with rank `peer`; return a text if the received vector is wrong, else None."""
    # Without a copy on the CPU, gloo fails on the tensors of healthy GPUs, and the nodes would be excluded.
    if device.type in copied_devices():
        device = torch.device("cpu")

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
    return "the received numbers differ from the sent numbers"


def reduce_all(device: torch.device) -> str | None:
    """Sum known vectors over all ranks; return a text if the sum is wrong, else None."""
    total = _vector(distributed.get_rank(), device)
    distributed.all_reduce(total)
    ranks = distributed.get_world_size()
    expected = _vector(0, device) * ranks + sum(rank % _RANKS for rank in range(ranks))
    if torch.equal(total, expected):
        return None
    return "the sum over all ranks is wrong"


def _vector(rank: int, device: torch.device) -> torch.Tensor:
    """Return the vector of a rank: float64 whole numbers, so small that their sums over ranks are exact."""
    return (torch.arange(_NUMBERS, device=device) % 61 + rank % _RANKS).double()
