"""The state of a link that outlives one connection: numbered messages, and the time of silence.

After a fault of the network another connection may replace a connection. Messages are numbered and kept until
the other side has confirmed them, so that no message is lost or repeated.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slurmddp.launchers.link.connection import MAX_MESSAGE_BYTES

Message = dict[str, Any]
"""A JSON object; `kind` names the dataclass of the message."""
Frame = list[Any]

Clock = Callable[[], float]
"""Seconds as `time.monotonic` counts them."""


class Join(NamedTuple):
    """The facts that a member sends about itself, with its proof, when it connects."""

    node: int
    host: str
    identity: str
    """A random number of each agent, by which the hub knows it again after a fault of the network."""
    received: int
    nonce: str


def copied(message: Message) -> Message:
    """Return the message as the other side gets it; raises ValueError if it is too long."""
    text = json.dumps(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"A message of {len(text)} bytes; at most {MAX_MESSAGE_BYTES} go at once.")
    return dict(json.loads(text))


class Session:
    """The numbers of the messages between two agents."""

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._kept: deque[tuple[int, Frame]] = deque()

    def numbered(self, message: Message) -> Frame:
        """Return the frame for a message, and keep it until the other side confirms it."""
        self._sent += 1
        frame = ["message", self._sent, message]
        self._kept.append((self._sent, frame))
        return frame

    def is_new(self, number: int) -> bool:
        """Take note of message `number`; return False if it came before by another connection."""
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def confirm(self, number: int) -> None:
        """Forget the messages up to `number`: the other side has them."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def unconfirmed(self) -> Iterable[Frame]:
        """Return the frames to send again over a new connection."""
        return [frame for _, frame in self._kept]


class Awake:
    """Seconds that this process spent awake: while it is stopped or busy elsewhere, no peer counts as silent.

    Each update adds the seconds since the last update, but `longest` at most.
    """

    def __init__(self, clock: Clock, longest: float) -> None:
        self.now = 0.0
        self._clock = clock
        self._longest = longest
        self._updated = clock()

    def update(self) -> float:
        """Return the seconds so far."""
        now = self._clock()
        self.now += min(now - self._updated, self._longest)
        self._updated = now
        return self.now

    def moment(self, when: float) -> float:
        """Return the `monotonic` time at which an update will return `when`."""
        return self._updated + when - self.now
