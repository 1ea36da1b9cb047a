"""Stopping together: any rank's signal leads all ranks to leave after the same step, for nothing per step.

A step here is what lies between two calls of `tick`.

The agreement needs no collective and no device synchronisation. A watcher thread of each rank looks into
the store a few times a second. Once somebody has asked to stop:

1. Each watcher posts how many steps its rank has started, and from then on its rank starts no other step
   (posting and starting exclude each other by a lock).
2. When all ranks have posted, each knows the highest number S. No rank has started more than S steps,
   since none could start one after posting.
3. A rank that has started fewer than S steps, because another one was a step ahead, goes on up to S; so
   collectives within those steps find all their members. Then all ranks stop, after step S.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from slurmddp.errors import RankFailure
from slurmddp.runs.folder.layout import is_there
from slurmddp.training.stopping.agreement_store import DECISION_POLL_S, STORE_TIMEOUT_S, AgreementStore, Store
from slurmddp.training.stopping.signals import StopSignals

__all__ = ["StopAgreement", "StopSignals"]

log = logging.getLogger(__name__)

FILE_POLL_S = 1.0
_LEAVING_S = 2.0
"""Seconds between the loss of the store and the warning of it: at the end of a training it is no loss."""
_STORE_LOST = "Rank %d has lost the store on the first rank (%s): only its own signals can stop it now."


def signal_reason(signals: StopSignals | None, rank: int) -> str | None:
    """Return the signal that has come to this rank, for the log."""
    name = signals.received if signals else None
    return f"{name} on rank {rank} ({socket.gethostname()})" if name else None


def file_reason(stop_file: Path | None) -> str | None:
    """Return the stop file's name if it is there."""
    return f"the file {stop_file}" if stop_file and is_there(stop_file) else None


class StopAgreement:
    """Tells all ranks to stop after the same step once any of them is asked to.

    All ranks create their agreements in the same order and call `tick` equally often: once before each
    step. `signals` is watched on this rank, `stop_file` is a path whose appearance means stop; it is looked
    for once a second, and on a shared file system given to one rank only.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        *,
        signals: StopSignals | None = None,
        stop_file: Path | None = None,
        prefix: str = "slurmddp/stop",
        poll_s: float | None = None,
        timeout_s: float = 120.0,
        launch_id: str = "",
    ) -> None:
        self._rank = rank
        self._signals, self._stop_file = signals, stop_file
        self._next_look = 0.0
        self._poll_s = poll_s if poll_s is not None else _usual_poll_s(world_size)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._started = 0
        self._posted = False
        self._own_request: str | None = None
        self._reason: str | None = None
        self._stop_at: int | None = None
        self._lost: RuntimeError | None = None
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._board: AgreementStore | None = None
        if store and world_size > 1:
            self._board = AgreementStore(store, rank, world_size, prefix, launch_id)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        if self._board or stop_file:
            self._thread = threading.Thread(target=self._watch, name="slurmddp-stop", daemon=True)
            self._thread.start()
            # A thread that is inside the store when the interpreter goes would abort the process.
            atexit.register(self.close)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a wish to stop; others may learn of it a moment later."""
        if self._reason is not None or self._own_request is not None:
            return True
        return self._signals is not None and self._signals.received is not None

    @property
    def reason(self) -> str | None:
        """Who asked to stop and why, for the log; None as long as nobody has."""
        return self._reason or self._own_reason()

    @property
    def started(self) -> int:
        """How many steps this rank has been allowed to start."""
        return self._started

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, for a reason other than a signal."""
        self._own_request = self._own_request or f"{reason} on rank {self._rank}"

    def tick(self) -> bool:
        """Return whether to stop now instead of starting the next step: at the same call on all ranks.

        Raises RankFailure when a rank does not take part in the agreement within `timeout_s`, or when this
        rank was asked to stop and can't tell the others: a save without them would never end.
        """
        with self._lock:
            if not self._posted and not (self._is_alone and self.requested):
                self._started += 1
                return False
        if self._board:
            self._await_decision(self._board)
        if self._stop_at is None or self._started >= self._stop_at:
            return True
        self._started += 1
        return False

    @property
    def _is_alone(self) -> bool:
        """Whether this rank agrees with no others: there are none, or the store is lost."""
        return self._board is None or self._lost is not None

    def close(self) -> None:
        """End the watcher; a rank that has finished its training thereby agrees to stop where it is."""
        self._closing.set()
        if self._thread is None or os.getpid() != self._pid:  # A forked process ends, the rank goes on.
            return
        self._thread.join(STORE_TIMEOUT_S)
        self._thread = None
        atexit.unregister(self.close)
        if self._board and self._lost is None:
            try:
                self._take_leave(self._board)
            except RuntimeError:
                log.debug("The store is gone already.")

    def _take_leave(self, board: AgreementStore) -> None:
        undecided = self._posted and self._stop_at is None
        if not self._posted:
            self._posted = True
            board.post(self._started)
        if self._stop_at is None:
            board.leave()
        if self._rank == 0 and not undecided and board.asked():
            board.linger()

    def __enter__(self) -> StopAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        """Run in the watcher thread, which alone talks to the store, until all is decided or closed."""
        pause_s = self._poll_s
        try:
            while not self._closing.wait(pause_s):
                if self._advance():
                    return
                pause_s = DECISION_POLL_S if self._posted else self._poll_s
        except RuntimeError as error:
            # The rank that hosts the store has left or died, or the network has failed.
            self._lost = error
            self._settled.set()
            if not self._closing.wait(_LEAVING_S):
                log.warning(_STORE_LOST, self._rank, _first_line(error))
        finally:
            self._settled.set()

    def _advance(self) -> bool:
        """Go one stage further if that is possible; return whether all is decided."""
        if not self._posted:
            self._look_around()
            if self._reason is None:
                return False
            self._post()
        stop_at = self._board.decision() if self._board else self._started
        if self._board and stop_at is not None:
            self._board.leave()
        self._stop_at = stop_at
        return stop_at is not None

    def _look_around(self) -> None:
        if self._signals:
            self._signals.look()
        reason = self._own_reason() or self._file_reason()
        if self._board:
            reason = self._board.ask(reason) if reason else self._board.asked()
        self._reason = reason

    def _post(self) -> None:
        """Freeze this rank and tell the others how far it is."""
        with self._lock:
            self._posted = True
        if self._board:
            self._board.post(self._started)

    def _own_reason(self) -> str | None:
        return signal_reason(self._signals, self._rank) or self._own_request

    def _file_reason(self) -> str | None:
        if self._stop_file is None or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + FILE_POLL_S
        return file_reason(self._stop_file)

    def _await_decision(self, board: AgreementStore) -> None:
        self._settled.wait(self._timeout_s)
        if self._stop_at is not None:
            return
        waiting = f"Rank {self._rank} was asked to stop ({self.reason}) and waited for the others to agree"
        if self._lost:
            gone = f"the store on the first rank went away: {_first_line(self._lost)}"
            raise RankFailure(f"{waiting}, but {gone}") from self._lost
        missing = ", ".join(str(rank) for rank in board.missing())
        raise RankFailure(
            f"{waiting}; after {self._timeout_s:g} s there was no answer from rank {missing}.",
            hint="That rank hangs or has died; its log says where.",
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _usual_poll_s(world_size: int) -> float:
    """About ten looks a second on few ranks, fewer on many: the store serves at most 2000 a second."""
    return max(0.1, world_size / 2000)
