"""One wait for everything that can happen to an agent: signals, what other agents say, what ranks hand over.

Nothing is polled: a signal, a message or the end of a child wakes it, and a moment at which something is due.
"""

from __future__ import annotations

import select
import signal
import time
from dataclasses import dataclass
from typing import Protocol

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.link.link import Link, Message


class Source(Protocol):
    """Something that has descriptors to wait on, and work to do when one of them is readable."""

    def descriptors(self) -> list[int]: ...
    def handle(self) -> object: ...


@dataclass(frozen=True)
class Happened:
    """What one wait has brought."""

    signals: list[signal.Signals]
    messages: list[tuple[int, Message]]


class Events:
    """The only place where an agent waits."""

    def __init__(self, inbox: SignalInbox, link: Link, *others: Source) -> None:
        self._inbox, self._link, self._others = inbox, link, others

    def wait(self, until: float) -> Happened:
        """Return as soon as something has come, or at `until` (of the monotonic clock)."""
        poll = select.poll()  # `select` itself takes no descriptor above 1023.
        for source in (self._link, *self._others):
            for descriptor in source.descriptors():
                poll.register(descriptor, select.POLLIN)
        poll.register(self._inbox.fileno(), select.POLLIN)
        left = min(until, self._link.next_look()) - time.monotonic()
        poll.poll(max(0.0, left) * 1000)
        # Signals first: the source of a SIGCHLD may be a child of another source.
        signals = self._inbox.read()
        for other in self._others:
            other.handle()
        return Happened(signals, self._link.handle())


@dataclass(frozen=True)
class Line:
    """Where the agent stands among the others, and how it hears of them and of all else."""

    node: RankInfo
    link: Link
    events: Events
