"""All-reduce by recursive halving and doubling."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import edges
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import Combine


def halving_doubling(flat: torch.Tensor, link: Link, combine: Combine = torch.Tensor.add_) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Partners at halving distances exchange halves of the range that they still reduce. Then partners at
    doubling distances exchange reduced ranges. On N = 2^k ranks each rank sends 2k messages, together
    2(N-1)/N of the tensor's bytes. On other numbers of ranks, the first ranks form pairs: one rank of each
    pair gives its tensor to its partner, and waits for the result.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.
        combine: reduces its second argument into the first; by default a sum.

    Source:
        Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
    """
    rank = link.rank
    power = 1 << (link.world_size.bit_length() - 1)
    # The ranks below this number form pairs, so that a power of two of ranks remains.
    paired = 2 * (link.world_size - power)
    if rank < paired and rank % 2 == 0:
        link.send(flat, rank + 1)()
        link.recv(flat, rank + 1)
        return

    if rank < paired:
        received = torch.empty_like(flat)
        link.recv(received, rank - 1)
        combine(flat, received)

    place = rank // 2 if rank < paired else rank - paired // 2
    _reduce_power_of_two(flat, link, place, power, paired, combine)
    if rank < paired:
        link.send(flat, rank - 1)()


def _reduce_power_of_two(
    flat: torch.Tensor, link: Link, place: int, power: int, paired: int, combine: Combine
) -> None:
    """Replace `flat` by its sum over `power` ranks, a power of two.

    Args:
        flat: the tensor of this rank.
        link: the link of this rank, to all ranks.
        place: the number of this rank among the ranks that reduce.
        power: the number of ranks that reduce.
        paired: the number of ranks that form pairs. Only one rank of each pair reduces.
        combine: reduces its second argument into the first.
    """
    chunk_edges = edges(flat.numel(), power)

    def chunks(begin: int, end: int) -> torch.Tensor:
        return flat[chunk_edges[begin] : chunk_edges[end]]

    received = torch.empty_like(flat)
    # First phase: this rank still reduces the chunks from `begin` to `end`. Each step halves them.
    begin = 0
    end = power
    distance = power // 2
    while distance:
        partner = _rank_at(place ^ distance, paired)
        middle = (begin + end) // 2
        if place & distance:
            done = link.send(chunks(begin, middle), partner)
            begin = middle
        else:
            done = link.send(chunks(middle, end), partner)
            end = middle

        kept = chunks(begin, end)
        link.recv(received[: len(kept)], partner)
        combine(kept, received[: len(kept)])
        done()
        distance //= 2

    # Second phase: this rank has the sums of the chunks from `begin` to `end`. Each step doubles them.
    distance = 1
    while distance < power:
        partner = _rank_at(place ^ distance, paired)
        done = link.send(chunks(begin, end), partner)
        if place & distance:
            link.recv(chunks(begin - distance, begin), partner)
            begin -= distance
        else:
            link.recv(chunks(end, end + distance), partner)
            end += distance

        done()
        distance *= 2


def _rank_at(place: int, paired: int) -> int:
    """Return the rank in `link` that has the number `place` among the ranks that reduce."""
    return 2 * place + 1 if place < paired // 2 else place + paired // 2
