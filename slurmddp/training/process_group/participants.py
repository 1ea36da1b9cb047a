"""Record in rank 0's store which ranks have joined, and the outcome of the rendezvous."""

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
"""Key that a rank sets if nodes don't have blocks of consecutive ranks (srun's `--distribution`)."""
_OUTCOME = "slurmddp/outcome"
_READ = "slurmddp/outcome_read"
"""Key of the number of ranks, without rank 0, that have read an outcome other than COMPLETE."""
_SHOWN = 8
"""The largest number of missing ranks that a message names."""


class Participants:
    """The ranks that take part in the rendezvous of one launch, by their entries in the store."""

    def __init__(self, store: dist.Store, info: RankInfo) -> None:
        self._store = SignedStore(store, info.launch_id)
        self._info = info

    def join(self) -> None:
        """Record in the store that this rank has joined.

        Raises:
            MismatchError: another process has joined with the same rank number.
        """
        rank = self._info.rank
        entry = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        if self._store.compare_set(_key(rank), entry) != entry:
            raise MismatchError(
                f"Two processes of launch {self._info.launch_id} have joined as rank {rank}.",
                hint="Start each rank once: one srun, and no RANK or SLURM_PROCID set by hand.",
            )

        nodes = self._nodes_in_blocks()
        if nodes and nodes[rank] != self._info.node_rank:
            self._store.set(_SCATTERED, "1")

        # Increase the counter after the entries are written, so that a full counter means that all are there.
        self._store.add(_COUNT, 1)

    def are_complete(self) -> bool:
        """Return whether all ranks have joined."""
        # Polling one counter is cheap, but counters are not signed: another process may have changed it. So
        # check the signed entries once the counter is full.
        if self._store.add(_COUNT, 0) < self._info.world_size:
            return False
        return not self._absent()

    def outcome(self) -> str | None:
        """Return how the rendezvous ended: COMPLETE, STOPPED or an error message; None before its end."""
        return self._store.get(_OUTCOME)

    def decide(self, outcome: str) -> str:
        """Set the outcome, unless a rank has already set one; return the outcome in the store."""
        return self._store.compare_set(_OUTCOME, outcome)

    def confirm_outcome(self) -> None:
        """Record that this rank has read an outcome other than COMPLETE, after which rank 0 exits."""
        self._store.add(_READ, 1)

    def have_all_read(self) -> bool:
        """Return whether all ranks that have joined, except rank 0, have called `confirm_outcome`."""
        return self._store.add(_READ, 0) >= self._store.add(_COUNT, 0) - 1

    def missing(self) -> str:
        """Return a sentence that names the missing ranks, with their hosts if these are known."""
        ranks = self._absent()
        shown = ranks[:_SHOWN]
        more = ", ..." if len(ranks) > _SHOWN else ""

        # A missing rank has not reported its node. Its host follows from its number only if each node has
        # consecutive ranks.
        nodes = self._nodes_in_blocks()
        if self._info.nodes == 1 or not nodes or self._store.get(_SCATTERED) is not None:
            named = f"rank {', '.join(map(str, shown))}"
        else:
            hosts = [self._info.hosts[node] for node in nodes]
            blocks = [(host, ", ".join(map(str, block))) for host, block in groupby(shown, hosts.__getitem__)]
            named = " and ".join(f"rank {block} on {host}" for host, block in blocks)

        return (
            f"{len(ranks)} of {self._info.world_size} ranks did not report to rank 0 on "
            f"{socket.gethostname()}: {named}{more}."
        )

    def _absent(self) -> list[int]:
        entries = self._store.get_all([_key(rank) for rank in range(self._info.world_size)])
        return [rank for rank, entry in enumerate(entries) if entry is None]

    def _nodes_in_blocks(self) -> list[int]:
        """Return the node of each rank if nodes have consecutive ranks; empty if that is unknown."""
        info = self._info
        tasks = info.tasks or (info.local_world_size,) * info.nodes
        nodes = [node for node, count in enumerate(tasks) for _ in range(count)]
        if len(nodes) != info.world_size or len(tasks) != len(info.hosts):
            return []
        return nodes


def _key(rank: int) -> str:
    return f"slurmddp/joined/{rank}"
