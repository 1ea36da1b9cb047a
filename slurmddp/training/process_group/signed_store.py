"""Sign values in torch's store, because every user who reaches rank 0's node can connect to the store.

A value carries an HMAC-SHA256 (RFC 2104) over its key and itself. The HMAC's key follows from the attempt's
secret and the launch, so values of an earlier launch are rejected. A value with a wrong HMAC is ignored with
a warning. Without a secret (torchrun, plain python) values are unsigned. Counters can't be signed, so a
counter only shows when to read signed values.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import RankFailure

_log = logging.getLogger(__name__)

READ_S = 2.0
"""The longest time in seconds that rank 0 waits until the other ranks have read a decision."""
_RANK_ZERO_S = 10.0
"""Seconds that the other ranks wait for rank 0's decision longer than rank 0 waits for their values."""
_POLL_S = 0.05
_TRIES = 16
"""The largest number of times that this rank replaces a value which a foreign process keeps writing."""


class SignedStore:
    """View of a store of torch in which ranks of one launch read only values that they have signed.

    Args:
        store: a store of torch.
        launch_id: the id of the launch. Values that another launch signed are ignored.
        secret: the secret for the signatures, by default the secret of the attempt. If it is empty, values
            are neither signed nor checked.
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
        """Return the value of `key`; None if no rank of this launch has set it. Does not wait."""
        # Check first, because torch's `get` waits for a missing key until the time-out of the store.
        if not self._store.check([key]):
            return None
        return self._value(key, bytes(self._store.multi_get([key])[0]))

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return one value per key; None for a key that no rank of this launch has set. Does not wait."""
        set_keys = list(keys)
        if not self._store.check(set_keys):
            set_keys = [key for key in keys if self._store.check([key])]

        stored = self._store.multi_get(set_keys) if set_keys else []
        values = {key: self._value(key, bytes(raw)) for key, raw in zip(set_keys, stored, strict=True)}
        return [values.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str | None]:
        """Wait until all keys are set, at most `timeout_s` seconds, and return their values.

        Returns:
            One value per key; None for a key that is not set in time.

        Raises:
            RuntimeError: the connection to the store is lost.
        """
        deadline = time.monotonic() + timeout_s
        # Ignore torch's error at a time-out: `get_all` below returns None for the missing keys.
        with suppress(dist.DistStoreError):
            self._store.wait(list(keys), timedelta(seconds=timeout_s))

        # torch's wait also ends at values of foreign processes, which `get_all` rejects. In this case read
        # the keys repeatedly until the time-out.
        while None in (values := self.get_all(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

        return values

    def decide_at_zero(
        self,
        key: str,
        info: RankInfo,
        value: str,
        decide: Callable[[list[str | None]], str],
        *,
        subject: str,
        timeout_s: float,
    ) -> str:
        """Gather a value of each rank on rank 0, which decides; return the decision on all ranks.

        Every rank calls it.

        Args:
            key: the key of the decision; the value of rank r has the key `{key}/{r}`.
            info: this rank.
            value: this rank's value.
            decide: called on rank 0 with the values of all ranks, None for a missing value.
            subject: what is decided, for the error message.
            timeout_s: seconds that rank 0 waits for the values.

        Raises:
            RankFailure: rank 0 has exited, or sent no decision within `timeout_s` + 10 seconds.
        """
        decision: str | None = None
        lost: RuntimeError | None = None
        try:
            self.set(f"{key}/{info.rank}", value)
            if info.rank == 0:
                values = self.wait([f"{key}/{rank}" for rank in range(info.world_size)], timeout_s)
                decision = decide(values)
                self.set(key, decision)
            else:
                (decision,) = self.wait([key], timeout_s + _RANK_ZERO_S)
        except RuntimeError as error:
            # The store ends with rank 0's process; raise a RankFailure below.
            lost = error

        if decision is None:
            raise RankFailure(
                f"Rank 0 has exited, or sent no decision on {subject} within {timeout_s + _RANK_ZERO_S:g} s.",
                hint="The log of rank 0 shows why.",
            ) from lost

        return decision

    def compare_set(self, key: str, value: str) -> str:
        """Set the value, unless a rank of this launch has already set one; return the value in the store."""
        signed = self._signed(key, value)
        expected = b""
        for _ in range(_TRIES):
            stored = bytes(self._store.compare_set(key, expected, signed))
            stored_value = self._value(key, stored)
            if stored_value is not None:
                return stored_value

            # A process outside the launch has set this value: replace it in the next try.
            expected = stored

        return value

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter and return its new value. Counters are not signed."""
        return int(self._store.add(key, amount))

    def await_all(self, key: str, info: RankInfo, timeout_s: float = READ_S) -> None:
        """Increase the counter `key` by 1; on rank 0, also wait until all ranks have done so.

        Rank 0 waits at most `timeout_s` seconds. It calls this before it exits, because the store ends with
        its process.
        """
        deadline = time.monotonic() + timeout_s
        # After its time-out rank 0 exits, so a late rank may find the store closed. No other rank waits for a
        # late rank, so the error is ignored.
        with suppress(RuntimeError):
            count = self.add(key, 1)
            while info.rank == 0 and count < info.world_size and time.monotonic() < deadline:
                time.sleep(0.005)
                count = self.add(key, 0)

    def _signed(self, key: str, value: str) -> str:
        if not self._key:
            return value
        return f"{self._mac(key, value)}:{value}"

    def _value(self, key: str, stored: bytes) -> str | None:
        """Return the value in the stored bytes `stored` if a rank of this launch has signed them.

        Otherwise return None, and log a warning once per key.
        """
        text = stored.decode(errors="replace")
        if not self._key:
            return text

        mac, _, value = text.partition(":")
        # Check for ASCII first, because `compare_digest` raises TypeError for other texts.
        if mac.isascii() and hmac.compare_digest(mac, self._mac(key, value)):
            return value

        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s in torch's store is ignored: a process outside this run has set it", key)

        return None

    def _mac(self, key: str, value: str) -> str:
        return hmac.digest(self._key, f"{len(key)} {key} {value}".encode(), "sha256").hex()
