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
_STORE_LOST = "Rank %d has lost the store on the first rank (%s): only its own signals can stop it now."


@dataclass(frozen=True)
class StopReason:
    """Why a training stops."""

    source: str
    """The name of a signal, STOP_FILE, TIME_LIMIT, or another request."""
    text: str
    """The source as a message shows it, with the rank that was asked."""
    rank: int | None = None
    """The rank that was asked to stop; None for the stop file, which asks all ranks."""

    def as_json(self) -> str:
        """Return the reason as JSON, for the other ranks."""
        return json.dumps([self.source, self.text, self.rank])

    @classmethod
    def from_json(cls, text: str) -> StopReason:
        """Return the reason that `as_json` has written."""
        return cls(*json.loads(text))


def signal_reason(signals: StopSignals | None, rank: int) -> StopReason | None:
    """Return the signal that this rank has received as a reason to stop; None without a signal."""
    if signals is None or signals.received is None:
        return None

    name = signals.received
    return StopReason(name, f"{name} on rank {rank} ({socket.gethostname()})", rank)


def file_reason(stop_file: Path | None) -> StopReason | None:
    """Return the stop file as a reason to stop; None if there is no such file."""
    if stop_file is None or not is_there(stop_file):
        return None
    return StopReason(STOP_FILE, f"the file {stop_file}")


class StopAgreement:
    """Agree with all ranks on the last step.

    All ranks create their agreements in the same order, and each calls `should_stop` once before each step.

    Args:
        store: torch's store; None for a single rank.
        rank: this rank.
        world_size: the number of ranks.
        signals: the signals of this rank that mean stop.
        stop_file: a path that means stop when it exists; on a shared file system, give it to one rank only.
        poll_s: seconds between two polls of the store; by default 0.1, and more if there are many ranks.
        timeout_s: seconds to wait for the other ranks to agree after a request to stop.
        launch_id: the launch, to which the entries in the store are bound.
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
        """Keeps the start of a step and the post of the number of started steps apart."""
        self._started = 0
        """How many steps this rank has started."""
        self._posted = False
        self._program_request: StopReason | None = None
        """The first reason given to `request`."""
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
        # Without a store or a stop file, only signals ask for a stop, and `reason` reads them itself.
        if self._shared or stop_file:
            self._thread = threading.Thread(target=self._watch, name="slurmddp-stop", daemon=True)
            self._thread.start()
            # The process would abort if the interpreter ended while the thread is inside the store.
            atexit.register(self.close)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request to stop; other ranks may learn of it a moment later."""
        return self.reason is not None

    @property
    def reason(self) -> StopReason | None:
        """Why the ranks stop; None without a request."""
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

        # Another rank has started this step already, and its collectives wait for this rank.
        self._started += 1
        return False

    def close(self) -> None:
        """End the watcher thread; a rank whose training has finished agrees to stop at its last step."""
        self._closing.set()

        # A forked child of the rank has no such thread.
        if self._thread is None or os.getpid() != self._pid:
            return

        self._thread.join(_STORE_TIMEOUT_S)
        self._thread = None
        atexit.unregister(self.close)
        # Other ranks that are asked to stop wait for this rank's post.
        if self._shared and self._lost is None:
            try:
                self._post_last_step(self._shared)
            except RuntimeError:
                log.debug("The store is gone already.")

    def _post_last_step(self, shared: AgreementStore) -> None:
        """Post the steps of a finished training, so that ranks which are asked to stop don't wait for it."""
        others_are_missing = self._posted and self._stop_at is None
        if not self._posted:
            self._posted = True
            shared.post(self._started)

        if self._stop_at is None:
            shared.mark_done()

        # Rank 0's process may hold the store. Without all posts there is no decision that others could read.
        if self._rank == 0 and not others_are_missing and shared.requested():
            shared.await_all_done()

    def _watch(self) -> None:
        """Run the watcher thread until the decision or `close`; no other thread uses the store meanwhile."""
        try:
            while not self._closing.wait(_DECISION_POLL_S if self._posted else self._poll_s):
                if self._advance():
                    return
        except RuntimeError as error:
            # Rank 0, which holds the store, has exited, or the network has failed.
            self._lost = error
            self._decides_alone = True
            self._decided.set()
            if not self._closing.wait(_CLOSING_S):
                log.warning(_STORE_LOST, self._rank, first_line(error))
        finally:
            self._decided.set()

    def _advance(self) -> bool:
        """Request, post or read the decision, whichever is next; return whether the decision is known."""
        if not self._posted:
            self._reason = self._read_request()
            if self._reason is None:
                return False

            self._post()

        stop_at = self._shared.decision() if self._shared else self._started
        # Rank 0 may end, and the store with it, once all ranks have read the decision.
        if self._shared and stop_at is not None:
            self._shared.mark_done()

        self._stop_at = stop_at
        return stop_at is not None

    def _read_request(self) -> StopReason | None:
        """Pass a request to this rank on to all ranks; return the reason on which all ranks agree."""
        if self._signals:
            self._signals.poll()

        reason = self._reason_on_this_rank() or self._file_reason()
        if self._shared is None:
            return reason
        if reason is None:
            return self._shared.requested()
        return self._shared.request(reason)

    def _post(self) -> None:
        """Let this rank start no further step, and post how many it has started."""
        # Under the lock, `should_stop` has either counted its step already or sees that it may not start it.
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
        """Wait until the last step is known; raise RankFailure if the other ranks don't agree in time."""
        self._decided.wait(self._timeout_s)
        if self._stop_at is not None:
            return

        why = f" ({self.reason.text})" if self.reason else ""
        waiting = f"Rank {self._rank} was asked to stop{why} and waited for the others to agree"
        if self._lost:
            raise RankFailure(
                f"{waiting}, but the store on the first rank went away: {first_line(self._lost)}"
            ) from self._lost

        missing = ", ".join(str(rank) for rank in shared.missing())
        raise RankFailure(
            f"{waiting}; after {self._timeout_s:g} s there was no answer from rank {missing}.",
            hint="That rank hangs or has died; its log says where.",
        )


def _default_poll_s(world_size: int) -> float:
    """Return at least 0.1 s, and so much that the store gets at most 2000 polls a second from all ranks."""
    return max(0.1, world_size / 2000)


class AgreementStore:
    """Read and write the entries of one agreement through a connection that no other code uses."""

    def __init__(self, store: Store, rank: int, world_size: int, launch_id: str) -> None:
        self._store = SignedStore(_second_connection(store), launch_id)
        self._rank = rank
        self._world_size = world_size

        # Number the agreements of each rank, so that the ranks never read entries of an earlier agreement.
        number = self._store.add(f"slurmddp/stop/created/{rank}", 1)
        self._prefix = f"slurmddp/stop/{number}"

    def request(self, reason: StopReason) -> StopReason:
        """Request a stop; return the reason of the first request, which may be another rank's."""
        first_text = self._store.compare_set(f"{self._prefix}/reason", reason.as_json())
        return StopReason.from_json(first_text)

    def requested(self) -> StopReason | None:
        """Return the reason of the first request for a stop, or None."""
        text = self._store.get(f"{self._prefix}/reason")
        if text is None:
            return None
        return StopReason.from_json(text)

    def post(self, started: int) -> None:
        """Post how many steps this rank has started; it starts no further step until all have posted."""
        self._store.set(self._key(self._rank), str(started))
        self._store.add(f"{self._prefix}/posted", 1)

    def decision(self) -> int | None:
        """Return the step after which all ranks stop; None while posts are missing."""
        if self._store.add(f"{self._prefix}/posted", 0) < self._world_size:
            return None

        posts = self._store.get_all([self._key(rank) for rank in range(self._world_size)])
        started = [int(post) for post in posts if post is not None]
        if len(started) < self._world_size:
            return None
        return max(started)

    def mark_done(self) -> None:
        """Record that this rank reads no more entries."""
        self._store.add(f"{self._prefix}/done", 1)

    def await_all_done(self) -> None:
        """Wait until no rank reads entries any more: rank 0's process may hold the store."""
        deadline = time.monotonic() + _DONE_S
        while self._store.add(f"{self._prefix}/done", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(_DECISION_POLL_S)

    def missing(self) -> list[int]:
        """Return the ranks that have not posted."""
        return [rank for rank in range(self._world_size) if self._store.get(self._key(rank)) is None]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/started/{rank}"


def _second_connection(store: Store) -> Store:
    """Connect a second time: a blocking call on the first connection would delay the watcher thread."""
    if not isinstance(store, TCPStore):
        return store

    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    return TCPStore(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
