"""The only wait of an agent: for signals, messages of other agents, requests of ranks, and deadlines."""

from __future__ import annotations

import select
import signal
import time
from dataclasses import dataclass
from typing import Protocol

from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.link.link import Link, Message


class Source(Protocol):
    """Something that has descriptors to wait on, and work to do when one of them is readable."""

    def descriptors(self) -> list[int]: ...
    def handle(self) -> object: ...


@dataclass(frozen=True)
class Happened:
    """The signals and messages that came during one wait; each message with its sender."""

    signals: list[signal.Signals]
    messages: list[tuple[int, Message]]


class Events:
    """The events of one agent: a signal, a message, the end of a child or a deadline ends the wait."""

    def __init__(self, inbox: SignalInbox, link: Link, *others: Source) -> None:
        self.link = link
        self._inbox, self._others = inbox, others

    def wait(self, until: float) -> Happened:
        """Return as soon as something has happened, and at `until` (of the monotonic clock) at the latest."""
        poll = select.poll()  # `select` itself takes no descriptor above 1023.
        for source in (self.link, *self._others):
            for descriptor in source.descriptors():
                poll.register(descriptor, select.POLLIN)
        poll.register(self._inbox.fileno(), select.POLLIN)
        left = min(until, self.link.next_deadline()) - time.monotonic()
        poll.poll(max(0.0, left) * 1000)
        # Signals first: the source of a SIGCHLD may be a child of another source.
        signals = self._inbox.read()
        for other in self._others:
            other.handle()
        return Happened(signals, self.link.handle())
