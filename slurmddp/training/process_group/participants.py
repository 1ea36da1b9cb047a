"""Record in rank 0's store which ranks have joined, and how the rendezvous ended."""

from __future__ import annotations

import os
import secrets
import socket
from itertools import groupby

import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.training.process_group.signed_store import SignedStore

COMPLETE = "complete"
STOPPED = "stopped"
_COUNT = "slurmddp/joined"
_SCATTERED = "slurmddp/scattered"
"""Set by a rank if the nodes don't hold blocks of consecutive ranks (srun's `--distribution`)."""
_OUTCOME = "slurmddp/outcome"
_READ = "slurmddp/outcome_read"
"""The number of ranks, without rank 0, that have read an outcome other than COMPLETE."""
_SHOWN = 8
"""Most missing ranks that a message names."""


class Participants:
    """The ranks of one launch, as their entries in the store show them."""

    def __init__(self, store: dist.Store, info: RankInfo) -> None:
        self._store, self._info = SignedStore(store, info.launch_id), info

    def join(self) -> None:
        """Record that this rank is here.

        Raises:
            MismatchError: another process has joined as the same rank; both would hang in a collective.
        """
        rank = self._info.rank
        own = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        if self._store.compare_set(_key(rank), own) != own:
            raise MismatchError(
                f"Two processes of launch {self._info.launch_id} say that they are rank {rank}.",
                hint="Start each rank once: one srun, and no RANK or SLURM_PROCID set by hand.",
            )
        nodes = self._nodes_in_blocks()
        if nodes and nodes[rank] != self._info.node_rank:
            self._store.set(_SCATTERED, "1")
        self._store.add(_COUNT, 1)

    def are_complete(self) -> bool:
        """Return whether all ranks have joined; the entries are read only once the counter says so."""
        return self._store.add(_COUNT, 0) >= self._info.world_size and not self._absent()

    def outcome(self) -> str | None:
        """Return COMPLETE, STOPPED or the reason of a failure; None while ranks may still join."""
        return self._store.get(_OUTCOME)

    def decide(self, outcome: str) -> str:
        """Set the outcome unless another rank was first; return the outcome that holds."""
        return self._store.compare_set(_OUTCOME, outcome)

    def confirm_outcome(self) -> None:
        """Record that this rank has read an outcome after which rank 0 exits."""
        self._store.add(_READ, 1)

    def have_all_read(self) -> bool:
        """Return whether all ranks that have joined have confirmed the outcome."""
        return self._store.add(_READ, 0) >= self._store.add(_COUNT, 0) - 1

    def missing(self) -> str:
        """Return a sentence that names the missing ranks, by host if hosts hold blocks of ranks."""
        ranks = self._absent()
        shown, more = ranks[:_SHOWN], ", ..." if len(ranks) > _SHOWN else ""
        nodes = self._nodes_in_blocks()
        if self._info.nodes == 1 or not nodes or self._store.get(_SCATTERED) is not None:
            named = f"rank {', '.join(map(str, shown))}"
        else:
            hosts = [self._info.hosts[node] for node in nodes]
            blocks = [(host, ", ".join(map(str, block))) for host, block in groupby(shown, hosts.__getitem__)]
            named = " and ".join(f"rank {block} on {host}" for host, block in blocks)
        of = f"{len(ranks)} of {self._info.world_size} ranks"
        return f"{of} did not report to rank 0 on {socket.gethostname()}: {named}{more}."

    def _absent(self) -> list[int]:
        entries = self._store.get_all([_key(rank) for rank in range(self._info.world_size)])
        return [rank for rank, entry in enumerate(entries) if entry is None]

    def _nodes_in_blocks(self) -> list[int]:
        """Return the node of each rank if each node holds a block of ranks; empty if that is unknown."""
        info = self._info
        tasks = info.tasks or (info.local_world_size,) * info.nodes
        nodes = [node for node, count in enumerate(tasks) for _ in range(count)]
        return nodes if len(nodes) == info.world_size and len(tasks) == len(info.hosts) else []


def _key(rank: int) -> str:
    return f"slurmddp/joined/{rank}"
