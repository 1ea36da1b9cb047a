"""Which nodes talk to each other before a training starts, how they do it, and who is to blame if they can't.

In every round a node has at most one partner, so that a silent one holds up no third node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import distributed

Pair = tuple[int, int]

_ALL_PAIRS_UP_TO = 8
_NUMBERS = 1024
_RANKS = 97


def rounds(nodes: int) -> list[list[Pair]]:
    """Return the pairs of each round: all there are for few nodes, else neighbours in a hypercube.

    With neighbours alone each node still has a pair, and a node that fails has several.
    """
    if nodes <= _ALL_PAIRS_UP_TO:
        return _tournament(nodes)
    bits = range((nodes - 1).bit_length())
    return [
        [(a, a | 1 << bit) for a in range(nodes) if not a & 1 << bit and a | 1 << bit < nodes] for bit in bits
    ]


def _tournament(nodes: int) -> list[list[Pair]]:
    """Let everybody meet everybody: one stays, the others walk around the table by one seat a round."""
    seats = list(range(nodes + nodes % 2))
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in facing if max(pair) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def to_blame(failed: Iterable[Pair], suspects: Collection[int] = ()) -> list[int]:
    """Return few nodes without which none of the failed pairs is left, those in most of them first.

    Of two that failed with each other only it is the one that has failed with another before (`suspects`), or
    else the later one: nothing tells which of them it was, and without one of them there is no such pair.
    """
    left, found = set(failed), []
    while left:
        counts = Counter(node for pair in left for node in pair)
        worst = max(counts, key=lambda node: (counts[node], node in suspects, node))
        found.append(worst)
        left = {pair for pair in left if worst not in pair}
    return found


def describe(
    node: int, failed: Mapping[Pair, str], names: Sequence[str], suspects: Collection[int] = ()
) -> str:
    """Return the sentence that says with whom a node did not exchange data, and why."""
    why = {(b if a == node else a): said for (a, b), said in failed.items() if node in (a, b)}
    others = ", ".join(names[other] for other in why)
    text = f"it does not exchange data with {others}: {next(iter(why.values()))}."
    if node in suspects:
        return f"{text} So it was with another node before."
    alone = len(why) == 1 and sum(next(iter(why)) in pair for pair in failed) == 1
    return f"{text} It may be {others} as well." if alone else text


def exchange(peer: int, device: torch.device) -> str | None:
    """Trade a known vector with rank `peer`; return what was wrong with the one that came, or None."""
    own = _vector(distributed.get_rank(), device)
    came = torch.empty_like(own)
    operations = [
        distributed.P2POp(distributed.isend, own, peer),
        distributed.P2POp(distributed.irecv, came, peer),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    return None if torch.equal(came, _vector(peer, device)) else "other numbers came than were sent"


def reduce_all(device: torch.device) -> str | None:
    """Sum a known vector over all ranks; return what was wrong with the sum, or None."""
    total = _vector(distributed.get_rank(), device)
    distributed.all_reduce(total)
    ranks = distributed.get_world_size()
    expected = _vector(0, device) * ranks + sum(rank % _RANKS for rank in range(ranks))
    return None if torch.equal(total, expected) else "the sum over all ranks is wrong"


def _vector(rank: int, device: torch.device) -> torch.Tensor:
    """Return whole numbers so small that every order of summation gives the same bits."""
    return (torch.arange(_NUMBERS, device=device) % 61 + rank % _RANKS).double()
