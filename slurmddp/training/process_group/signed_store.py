"""Signed values in torch's store, to which any account on rank 0's node can connect.

A value carries an HMAC over its key and itself, made with the attempt's secret. The HMAC's key is bound to
the launch (job, step, restart, generation of ranks), so a value of an earlier launch does not count. A value
without a right HMAC is ignored with a warning. Without a secret (torchrun, plain python) values go unsigned.
Counters can't be signed, so a counter only says when to look at signed values.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slurmddp.environments.names import SECRET_VARIABLE

_log = logging.getLogger(__name__)

READ_S = 2.0
"""Seconds for which rank 0 waits until the other ranks have read a value."""
_POLL_S = 0.05
_TRIES = 16
"""Most times that our value replaces a foreign one, if another process keeps writing it."""


class SignedStore:
    """Read and write values of one launch's ranks in `store`.

    `secret` is by default the attempt's secret. Without any secret, values are neither signed nor checked.
    """

    def __init__(self, store: Any, launch_id: str, secret: str | None = None) -> None:
        secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
        text = f"slurmddp store of {launch_id}"
        self._key = hmac.digest(secret.encode(), text.encode(), "sha256") if secret else b""
        self._store = store
        self._warned: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> str | None:
        """Return the value that a rank of this launch has set, or None."""
        return self._value(key, bytes(self._store.multi_get([key])[0])) if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values that ranks of this launch have set, None for each that is missing."""
        there = list(keys) if self._store.check(list(keys)) else [k for k in keys if self._store.check([k])]
        stored = self._store.multi_get(there) if there else []
        found = {key: self._value(key, bytes(one)) for key, one in zip(there, stored, strict=True)}
        return [found.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str | None]:
        """Return the values as soon as all are there, or those that are there after `timeout_s`.

        Raises RuntimeError when the store is gone.
        """
        deadline = time.monotonic() + timeout_s
        with suppress(dist.DistStoreError):  # The look that follows tells which keys are missing.
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
        while None in (values := self.get_all(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return values

    def compare_set(self, key: str, value: str) -> str:
        """Set the value unless a rank of this launch was first, and return the value that stands."""
        own, expected = self._signed(key, value), b""
        for _ in range(_TRIES):
            stored = bytes(self._store.compare_set(key, expected, own))
            if (found := self._value(key, stored)) is not None:
                return found
            expected = stored
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which anybody may change, and return it."""
        return int(self._store.add(key, amount))

    def until_read(self, key: str, rank: int, world_size: int) -> None:
        """Tell rank 0 that this rank has read the value of `key`; rank 0 waits until all have told it.

        The store ends with the process of rank 0, so rank 0 calls this before it leaves because of the value.
        """
        deadline = time.monotonic() + READ_S
        with suppress(RuntimeError):
            self.add(f"{key}/read", 1)
            while rank == 0 and self.add(f"{key}/read", 0) < world_size and time.monotonic() < deadline:
                time.sleep(0.005)

    def _signed(self, key: str, value: str) -> str:
        return f"{self._mac(key, value)}:{value}" if self._key else value

    def _value(self, key: str, stored: bytes) -> str | None:
        text = stored.decode(errors="replace")
        if not self._key:
            return text
        mac, _, value = text.partition(":")
        if mac.isascii() and hmac.compare_digest(mac, self._mac(key, value)):
            return value
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s in torch's store was set by a process outside this run: ignored", key)
        return None

    def _mac(self, key: str, value: str) -> str:
        return hmac.digest(self._key, f"{len(key)} {key} {value}".encode(), "sha256").hex()
