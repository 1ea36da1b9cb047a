"""The entries of a stop agreement in torch's store; no collective is involved."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import Store, TCPStore

from slurmddp.training.process_group.signed_store import SignedStore

DONE_S = 5.0
"""Most seconds that rank 0 keeps the store open for ranks that still read it."""
DECISION_POLL_S = 0.01
STORE_TIMEOUT_S = 30.0


class AgreementStore:
    """The entries of one agreement, read and written through a connection that no other code uses."""

    def __init__(self, store: Store, rank: int, world_size: int, launch_id: str) -> None:
        self._store = SignedStore(_second_connection(store), launch_id)
        self._rank, self._world_size = rank, world_size
        # Number the agreements of each rank, so that the ranks never read entries of an earlier agreement.
        number = self._store.add(f"slurmddp/stop/created/{rank}", 1)
        self._prefix = f"slurmddp/stop/{number}"

    def request(self, reason: str) -> str:
        """Request a stop; return the reason of the first request."""
        return self._store.compare_set(f"{self._prefix}/reason", reason)

    def requested(self) -> str | None:
        """Return the reason of the first request for a stop, or None."""
        return self._store.get(f"{self._prefix}/reason")

    def post(self, started: int) -> None:
        """Post how many steps this rank has started; it starts no further step until all have posted."""
        self._store.set(self._key(self._rank), str(started))
        self._store.add(f"{self._prefix}/posted", 1)

    def decision(self) -> int | None:
        """Return the step after which all ranks stop; None while posts are missing."""
        if self._store.add(f"{self._prefix}/posted", 0) < self._world_size:
            return None
        posts = self._store.get_all([self._key(rank) for rank in range(self._world_size)])
        known = [int(post) for post in posts if post is not None]
        return max(known) if len(known) == self._world_size else None

    def mark_done(self) -> None:
        """Record that this rank reads no more entries."""
        self._store.add(f"{self._prefix}/done", 1)

    def await_all_done(self) -> None:
        """Wait until no rank reads entries any more: rank 0's process may hold the store."""
        deadline = time.monotonic() + DONE_S
        while self._store.add(f"{self._prefix}/done", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(DECISION_POLL_S)

    def missing(self) -> list[int]:
        """Return the ranks that have not posted."""
        return [rank for rank in range(self._world_size) if self._store.get(self._key(rank)) is None]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/started/{rank}"


def _second_connection(store: Store) -> Store:
    """Connect a second time: a blocking call on the first connection would delay the watcher thread."""
    if not isinstance(store, TCPStore):
        return store
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
