"""What ranks that agree on a stop tell each other through the store, which is no collective."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore

from slurmddp.training.process_group.signed_store import SignedStore

LINGER_S = 5.0
DECISION_POLL_S = 0.01
STORE_TIMEOUT_S = 30.0


class Store(Protocol):
    """The part of a torch store that an agreement uses."""

    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class AgreementStore:
    """The keys of one agreement in the store, used through a connection of their own."""

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str, launch_id: str = "") -> None:
        self._store = SignedStore(_own_client(store), launch_id)
        self._rank, self._world_size = rank, world_size
        # The n-th agreement of every rank meets the n-th of the others, never keys of an earlier one.
        number = self._store.add(f"{prefix}/created/{rank}", 1)
        self._prefix = f"{prefix}/{number}"

    def ask(self, reason: str) -> str:
        """Put up a wish to stop; return the reason that was there first."""
        return self._store.compare_set(f"{self._prefix}/reason", reason)

    def asked(self) -> str | None:
        return self._store.get(f"{self._prefix}/reason")

    def post(self, started: int) -> None:
        self._store.set(self._key(self._rank), str(started))
        self._store.add(f"{self._prefix}/posted", 1)

    def decision(self) -> int | None:
        """Return the step after which all stop, or None while posts are missing."""
        if self._store.add(f"{self._prefix}/posted", 0) < self._world_size:
            return None
        posts = self._store.get_all([self._key(rank) for rank in range(self._world_size)])
        known = [int(post) for post in posts if post is not None]
        return max(known) if len(known) == self._world_size else None

    def leave(self) -> None:
        """Say that this rank knows all that it needs from the others."""
        self._store.add(f"{self._prefix}/left", 1)

    def linger(self) -> None:
        """Wait until all ranks know enough: rank 0's process may be the one that holds the store."""
        deadline = time.monotonic() + LINGER_S
        while self._store.add(f"{self._prefix}/left", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(DECISION_POLL_S)

    def missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self._store.get(self._key(rank)) is None]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/started/{rank}"


def _own_client(store: Store) -> Store:
    """Open a second connection: a blocking call on the first one would hold up the watcher."""
    if not isinstance(store, TCPStore):
        return store
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    client: Store = TCPStore(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return client
