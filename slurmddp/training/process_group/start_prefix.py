"""Give each start of the ranks a separate part of a store that outlives the ranks.

torchrun keeps one store over all restarts (torch 2.13), and its restart counts differ between nodes. In the
bare store a restarted rank would read the addresses of dead ranks, and their requests to stop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError
from slurmddp.short_text import first_items
from slurmddp.training.process_group.signed_store import SignedStore

_OFFER = "slurmddp/start"
_PAUSES_S = (0.002, 0.1)
"""The first and the longest pause in seconds between two polls of the store."""
_SHOWN = 8
"""The largest number of missing ranks that a message names."""


def part_of_this_start(store: dist.Store, info: RankInfo, timeout_s: float) -> dist.Store:
    """Return `store` under a prefix that only the ranks of this start share. All ranks call it.

    Each rank writes a random token. Rank 0 offers a random prefix together with all tokens, and offers it
    again when a token changes. A rank accepts an offer that contains its token. So no rank mistakes tokens or
    offers of an earlier start for those of this start.

    Args:
        store: the store that all ranks share; values of earlier starts may be in it.
        info: this rank.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        SlurmddpError: not all ranks have accepted after `timeout_s`.
    """
    if info.world_size == 1:
        return store

    signed = SignedStore(store, info.launch_id)
    deadline = time.monotonic() + timeout_s
    agree = _offer if info.rank == 0 else _accept
    prefix = agree(signed, info, deadline)
    return dist.PrefixStore(f"{_OFFER}/{prefix}", store)


def _offer(store: SignedStore, info: RankInfo, deadline: float) -> str:
    """Offer a random prefix to the other ranks, and return it once all have accepted; runs on rank 0.

    Raises:
        SlurmddpError: not all ranks have accepted before the deadline.
    """
    prefix = secrets.token_hex(8)
    offered: list[str | None] | None = None
    store.set(_token_of(0), f"{prefix}:{info.world_size}")
    for _ in _polls(deadline):
        tokens = store.get_all([_token_of(rank) for rank in range(1, info.world_size)])
        # Tokens may be of an earlier start. A rank that starts replaces its token, so offer again then.
        if None not in tokens and tokens != offered:
            offered = tokens
            store.set(_OFFER, " ".join([prefix, *map(str, tokens)]))

        if store.add(f"{_OFFER}/{prefix}/accepted", 0) == info.world_size - 1:
            return prefix

    accepted = store.get_all([f"{_OFFER}/{prefix}/accepted-{rank}" for rank in range(1, info.world_size)])
    missing = [rank for rank, value in enumerate(accepted, 1) if value is None]
    shown = first_items(missing, _SHOWN, rest=", ...")
    sizes = (_other_size(store, rank, info) for rank in range(1, info.world_size))
    other_size = next((sentence for sentence in sizes if sentence), "")
    raise SlurmddpError(
        f"{len(missing)} of {info.world_size} ranks have not started with rank 0: rank {shown}.{other_size}",
        hint="The logs of these ranks show why; a rank without a log was not started.",
    )


def _accept(store: SignedStore, info: RankInfo, deadline: float) -> str:
    """Wait for an offer that contains this rank's token, accept it, and return its prefix.

    Raises:
        SlurmddpError: there is no such offer before the deadline.
    """
    token = f"{secrets.token_hex(8)}:{info.world_size}"
    store.set(_token_of(info.rank), token)
    for _ in _polls(deadline):
        prefix, *tokens = (store.get(_OFFER) or "none").split()
        # An offer of an earlier start contains other tokens, so it is ignored.
        if len(tokens) == info.world_size - 1 and tokens[info.rank - 1] == token:
            store.set(f"{_OFFER}/{prefix}/accepted-{info.rank}", "1")
            store.add(f"{_OFFER}/{prefix}/accepted", 1)
            return prefix

    raise SlurmddpError(
        f"Rank 0 has not started with rank {info.rank}.{_other_size(store, 0, info)}",
        hint="The log of rank 0 shows why.",
    )


def _other_size(store: SignedStore, rank: int, info: RankInfo) -> str:
    """Return a sentence if `rank` has another WORLD_SIZE than this rank, else an empty text."""
    size = (store.get(_token_of(rank)) or "").rpartition(":")[2]
    if size in ("", str(info.world_size)):
        return ""

    return f" Rank {rank} counts {size} ranks (WORLD_SIZE), rank {info.rank} counts {info.world_size}."


def _polls(deadline: float) -> Iterator[None]:
    """Yield at once, and then after each of a series of growing pauses, until the deadline."""
    pause_s, longest_s = _PAUSES_S
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)
        pause_s = min(longest_s, 1.5 * pause_s)


def _token_of(rank: int) -> str:
    return f"{_OFFER}/token-{rank}"
