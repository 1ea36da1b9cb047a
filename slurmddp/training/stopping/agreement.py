"""Let all ranks stop after the same step once any rank is asked to stop.

The agreement needs no collective and no device synchronisation. A step is the time between two calls of
`should_stop`. A watcher thread of each rank polls the store a few times a second. After a request to stop:

1. Each watcher posts how many steps its rank has started. From then on its rank starts no further step. A
   lock keeps posting and starting apart.
2. When all ranks have posted, each rank knows the highest number S. No rank has started more than S steps,
   because no rank can start a step after posting.
3. A rank that has started fewer than S steps continues up to S, so that the collectives within those steps
   find all their members. Then all ranks stop, after step S.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore

from slurmddp.errors import RankFailure
from slurmddp.runs.folder.history import STOP_FILE, TIME_LIMIT
from slurmddp.runs.folder.late_files import is_there
from slurmddp.short_text import first_line
from slurmddp.training.process_group.signed_store import SignedStore
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

_FILE_POLL_S = 1.0
"""Seconds between two polls of the stop file, which may be on a shared file system."""
_CLOSING_S = 2.0
"""Seconds to wait before the warning of a lost store: at the end of a training the loss is expected."""
_DONE_S = 5.0
"""The longest time in seconds that rank 0 keeps the store open for ranks that still read it."""
_DECISION_POLL_S = 0.01
"""Seconds between two polls of the store after a request to stop, while all ranks wait."""
_STORE_TIMEOUT_S = 30.0
_PHRASES = {TIME_LIMIT: "the time limit"}
"""The phrase for a source of a stop in a message; other sources are shown by their names."""
_STORE_LOST = "Rank %d has lost the connection to torch's store (%s): only its own signals can stop it now."


@dataclass(frozen=True)
class StopReason:
    """The reason why a training stops: what asked for the stop, and which rank was asked."""

    source: str
    """The name of a signal, STOP_FILE, TIME_LIMIT, or another request."""
    text: str
    """The source as a message shows it, with the rank that was asked."""
    rank: int | None = None
    """The rank that was asked to stop; None for the stop file, which asks all ranks."""

    def as_json(self) -> str:
        """Return the reason as a JSON text, which the store passes to the other ranks."""
        return json.dumps([self.source, self.text, self.rank])

    @classmethod
    def from_json(cls, text: str) -> StopReason:
        """Return the reason in a text that `as_json` has returned."""
        return cls(*json.loads(text))


def signal_reason(signals: StopSignals | None, rank: int) -> StopReason | None:
    """Return a reason that names the first stop signal of this rank; None if no signal has arrived."""
    if signals is None or signals.received is None:
        return None

    name = signals.received
    return StopReason(name, f"{name} on rank {rank} ({socket.gethostname()})", rank)


def file_reason(stop_file: Path | None) -> StopReason | None:
    """Return a reason that names the stop file; None if the file does not exist."""
    if stop_file is None or not is_there(stop_file):
        return None
    return StopReason(STOP_FILE, f"the file {stop_file}")


class StopAgreement:
    """The agreement of all ranks on the step after which they stop, through entries in the store.

    All ranks create their agreements in the same order, and each calls `should_stop` once before each step.

    Args:
        store: torch's store; None for a single rank.
        rank: this rank.
        world_size: the number of ranks.
        signals: receives the signals of this rank that request a stop; None: no signal does.
        stop_file: a path whose existence requests a stop. On a shared file system, give it to one rank only.
        poll_s: seconds between two polls of the store; by default `max(0.1, world_size / 2000)`.
        timeout_s: seconds to wait for the other ranks to agree after a request to stop.
        launch_id: the id of the launch. Entries of other launches in the store are ignored.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        *,
        signals: StopSignals | None = None,
        stop_file: Path | None = None,
        poll_s: float | None = None,
        timeout_s: float = 120.0,
        launch_id: str = "",
    ) -> None:
        self._rank = rank
        self._signals = signals
        self._stop_file = stop_file
        self._next_file_poll = 0.0
        self._poll_s = poll_s if poll_s is not None else _default_poll_s(world_size)
        self._timeout_s = timeout_s

        self._lock = threading.Lock()
        """Lock, so that no step starts while the number of started steps is posted."""
        self._started = 0
        """How many steps this rank has started."""
        self._posted = False
        self._program_request: StopReason | None = None
        """The reason of the first call of `request`; None before."""
        self._reason: StopReason | None = None
        """The reason on which all ranks agree: the first one in the store."""
        self._stop_at: int | None = None
        """The number of steps after which all ranks stop; None before the decision."""
        self._lost: RuntimeError | None = None
        """The error with which the connection to the store was lost."""
        self._decided = threading.Event()
        self._closing = threading.Event()

        self._shared: AgreementStore | None = None
        if store and world_size > 1:
            self._shared = AgreementStore(store, rank, world_size, launch_id)

        self._decides_alone = self._shared is None
        """Whether this is the only rank, or the store is lost; an attribute, because each step reads it."""

        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        # The thread polls the store and the stop file. With neither, only signals and `request` can request a
        # stop, and `should_stop` sees both without a thread.
        if self._shared or stop_file:
            self._thread = threading.Thread(target=self._watch, name="slurmddp-stop", daemon=True)
            self._thread.start()
            # End the thread before the interpreter ends: a thread inside the store would abort the process.
            atexit.register(self.close)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request to stop; other ranks learn of it at their next poll."""
        return self.reason is not None

    @property
    def reason(self) -> StopReason | None:
        """The reason of the stop; None if no stop was requested."""
        return self._reason or self._reason_on_this_rank()

    def request(self, source: str) -> None:
        """Request a stop by a source other than a signal or the stop file, such as TIME_LIMIT."""
        if self._program_request is None:
            text = f"{_PHRASES.get(source, source)} on rank {self._rank}"
            self._program_request = StopReason(source, text, self._rank)

    def should_stop(self) -> bool:
        """Decide whether to stop now instead of starting the next step; all ranks stop at the same call.

        Raises:
            RankFailure: a rank does not answer within `timeout_s`, or this rank can't reach the store after
                a request to stop. Without the other ranks a save would never end.
        """
        with self._lock:
            if not self._posted and (not self._decides_alone or self.reason is None):
                self._started += 1
                return False

        if self._shared:
            self._await_decision(self._shared)

        if self._stop_at is None or self._started >= self._stop_at:
            return True

        # Another rank has already started this step, and its collectives need this rank to take part.
        self._started += 1
        return False

    def close(self) -> None:
        """End the watcher thread, and post this rank's last step if it has posted none."""
        self._closing.set()

        # The watcher thread does not exist in a forked child of the rank.
        if self._thread is None or os.getpid() != self._pid:
            return

        self._thread.join(_STORE_TIMEOUT_S)
        self._thread = None
        atexit.unregister(self.close)
        # Ranks that are asked to stop from now on would wait for this rank's post until the time-out.
        if self._shared and self._lost is None:
            try:
                self._post_last_step(self._shared)
            except RuntimeError:
                log.debug("The store is closed already, so this rank's last step is not posted.")

    def _post_last_step(self, shared: AgreementStore) -> None:
        """Post how many steps the finished training has started, so that no rank waits for the post."""
        others_are_missing = self._posted and self._stop_at is None
        if not self._posted:
            self._posted = True
            shared.post(self._started)

        if self._stop_at is None:
            shared.mark_done()

        # Rank 0's process may hold the store, so it waits until the other ranks have read the decision. If
        # posts of other ranks are missing, there is no decision to read.
        if self._rank == 0 and not others_are_missing and shared.requested():
            shared.await_all_done()

    def _watch(self) -> None:
        """Poll until the last step is decided or `close` is called; the code of the watcher thread.

        No other thread uses the store meanwhile.
        """
        try:
            while not self._closing.wait(_DECISION_POLL_S if self._posted else self._poll_s):
                if self._advance():
                    return
        except RuntimeError as error:
            # Either the process that holds the store has exited, or the network has failed. From now on this
            # rank reacts to its own signals only.
            self._lost = error
            self._decides_alone = True
            self._decided.set()
            if not self._closing.wait(_CLOSING_S):
                log.warning(_STORE_LOST, self._rank, first_line(error))
        finally:
            self._decided.set()

    def _advance(self) -> bool:
        """Poll the store once: look for a request to stop, post this rank's steps, read the last step.

        Return whether the last step is known.
        """
        if not self._posted:
            self._reason = self._read_request()
            if self._reason is None:
                return False

            self._post()

        stop_at = self._shared.decision() if self._shared else self._started
        # Rank 0 waits for these marks before it exits, because the store may end with its process.
        if self._shared and stop_at is not None:
            self._shared.mark_done()

        self._stop_at = stop_at
        return stop_at is not None

    def _read_request(self) -> StopReason | None:
        """Publish a request to this rank; return the reason of the first request of any rank, or None."""
        if self._signals:
            self._signals.poll()

        reason = self._reason_on_this_rank() or self._file_reason()
        if self._shared is None:
            return reason
        if reason is None:
            return self._shared.requested()
        return self._shared.request(reason)

    def _post(self) -> None:
        """Block further steps of this rank, and post how many steps it has started."""
        # `should_stop` counts steps under the same lock: once `_posted` is set, `_started` is final.
        with self._lock:
            self._posted = True

        if self._shared:
            self._shared.post(self._started)

    def _reason_on_this_rank(self) -> StopReason | None:
        return signal_reason(self._signals, self._rank) or self._program_request

    def _file_reason(self) -> StopReason | None:
        if self._stop_file is None or time.monotonic() < self._next_file_poll:
            return None

        self._next_file_poll = time.monotonic() + _FILE_POLL_S
        return file_reason(self._stop_file)

    def _await_decision(self, shared: AgreementStore) -> None:
        """Wait until all ranks have agreed on the last step, so that `_stop_at` is set.

        Raises:
            RankFailure: the store was lost, or ranks have not posted within `timeout_s`.
        """
        self._decided.wait(self._timeout_s)
        if self._stop_at is not None:
            return

        why = f" ({self.reason.text})" if self.reason else ""
        waiting = f"Rank {self._rank} was asked to stop{why} and waited for the others to agree"
        if self._lost:
            raise RankFailure(
                f"{waiting}, but the connection to torch's store was lost: {first_line(self._lost)}",
                hint="The process with the store, usually rank 0, has exited, or the network has failed.",
            ) from self._lost

        missing = ", ".join(str(rank) for rank in shared.missing())
        raise RankFailure(
            f"{waiting}; after {self._timeout_s:g} s there was no answer from rank {missing}.",
            hint="A rank that does not answer hangs or has died; its log shows where.",
        )


def _default_poll_s(world_size: int) -> float:
    """Return the seconds between two polls of a rank: 0.1, or more to keep all ranks below 2000 polls/s."""
    return max(0.1, world_size / 2000)


class AgreementStore:
    """The entries of one agreement in the store, over a connection that no other code uses."""

    def __init__(self, store: Store, rank: int, world_size: int, launch_id: str) -> None:
        self._store = SignedStore(_second_connection(store), launch_id)
        self._rank = rank
        self._world_size = world_size

        # All ranks create their agreements in the same order, so the same number means the same agreement.
        number = self._store.add(f"slurmddp/stop/created/{rank}", 1)
        self._prefix = f"slurmddp/stop/{number}"

    def request(self, reason: StopReason) -> StopReason:
        """Request a stop; return the reason of the first request, which may be another rank's."""
        first_text = self._store.compare_set(f"{self._prefix}/reason", reason.as_json())
        return StopReason.from_json(first_text)

    def requested(self) -> StopReason | None:
        """Return the reason of the first request of any rank; None without a request."""
        text = self._store.get(f"{self._prefix}/reason")
        if text is None:
            return None
        return StopReason.from_json(text)

    def post(self, started: int) -> None:
        """Publish how many steps this rank has started.

        The caller starts no further step before `decision` returns a number.
        """
        self._store.set(self._key(self._rank), str(started))
        self._store.add(f"{self._prefix}/posted", 1)

    def decision(self) -> int | None:
        """Return the step after which all ranks stop: the highest post. None while posts are missing."""
        if self._store.add(f"{self._prefix}/posted", 0) < self._world_size:
            return None

        posts = self._store.get_all([self._key(rank) for rank in range(self._world_size)])
        started = [int(post) for post in posts if post is not None]
        if len(started) < self._world_size:
            return None
        return max(started)

    def mark_done(self) -> None:
        """Record that this rank will read no more entries of this agreement."""
        self._store.add(f"{self._prefix}/done", 1)

    def await_all_done(self) -> None:
        """Wait until all ranks have called `mark_done`, at most `_DONE_S` seconds.

        Rank 0 calls it before it exits, because its process may hold the store.
        """
        deadline = time.monotonic() + _DONE_S
        while self._store.add(f"{self._prefix}/done", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(_DECISION_POLL_S)

    def missing(self) -> list[int]:
        """Return the ranks that have not posted."""
        return [rank for rank in range(self._world_size) if self._store.get(self._key(rank)) is None]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/started/{rank}"


def _second_connection(store: Store) -> Store:
    """Return a second connection to a TCPStore; return a store of another class unchanged.

    A blocking call on the first connection would delay the watcher thread.
    """
    if not isinstance(store, TCPStore):
        return store

    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    return TCPStore(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
