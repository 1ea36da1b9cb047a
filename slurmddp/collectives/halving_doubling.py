"""All-reduce by recursive halving and doubling."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import edges
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import Combine


def halving_doubling(flat: torch.Tensor, link: Link, combine: Combine = torch.Tensor.add_) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Partners at halving distances exchange halves of what they still add up, and then double what they know.
    On 2^k ranks each rank sends 2k messages and 2(N-1)/N of the tensor. On other numbers of ranks, the first
    ranks join in pairs first, and one rank of each pair waits for the result.

    Args:
        flat: contiguous, of one dimension, of equal length and dtype on all ranks.
        link: of this rank.
        combine: reduces its second argument into the first; by default a sum.

    Source:
        Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
    """
    rank, size = link.rank, link.world_size
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)
    """The ranks below this number form pairs."""
    if rank < paired and rank % 2 == 0:
        link.send(flat, rank + 1)()
        link.recv(flat, rank + 1)
        return
    if rank < paired:
        received = torch.empty_like(flat)
        link.recv(received, rank - 1)
        combine(flat, received)
    place = rank // 2 if rank < paired else rank - paired // 2
    _among_power_of_two(flat, link, place, power, paired, combine)
    if rank < paired:
        link.send(flat, rank - 1)()


def _among_power_of_two(
    flat: torch.Tensor, link: Link, place: int, power: int, paired: int, combine: Combine
) -> None:
    """Reduce among `power` ranks, of which this one has the number `place`."""
    at, received = edges(flat.numel(), power), torch.empty_like(flat)
    begin, end = 0, power
    distance = power // 2
    while distance:
        partner = _rank_at(place ^ distance, paired)
        middle = (begin + end) // 2
        keeps_upper = bool(place & distance)
        kept, sent = ((middle, end), (begin, middle)) if keeps_upper else ((begin, middle), (middle, end))
        done = link.send(flat[at[sent[0]] : at[sent[1]]], partner)
        own = flat[at[kept[0]] : at[kept[1]]]
        link.recv(received[: len(own)], partner)
        combine(own, received[: len(own)])
        done()
        begin, end = kept
        distance //= 2
    distance = 1
    while distance < power:
        partner = _rank_at(place ^ distance, paired)
        other = (begin - distance, begin) if place & distance else (end, end + distance)
        done = link.send(flat[at[begin] : at[end]], partner)
        link.recv(flat[at[other[0]] : at[other[1]]], partner)
        done()
        begin, end = min(begin, other[0]), max(end, other[1])
        distance *= 2


def _rank_at(place: int, paired: int) -> int:
    return 2 * place + 1 if place < paired // 2 else place + paired // 2
