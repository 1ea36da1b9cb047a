"""What two agents know of each other beyond a single connection: messages and silence.

A connection may be replaced by another one after a fault of the network. Messages are numbered and kept until
the other side has confirmed them, so none is lost and none is told twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slurmddp.launchers.link.wire import MAX_MESSAGE_BYTES

Message = dict[str, Any]
"""A JSON object; `kind` says what it is."""
Frame = list[Any]
ALL = -1
"""In place of a node rank: every node, the hub's own included."""

Clock = Callable[[], float]
"""Seconds as `time.monotonic` counts them."""


class Join(NamedTuple):
    """What a member says of itself, under its proof, when it connects."""

    node: int
    host: str
    identity: str
    """Drawn by each agent for itself: by it one that comes again after a fault of the network is known."""
    received: int
    nonce: str


def copied(message: Message) -> Message:
    """Return the message as the other side will see it; raises ValueError when it is too long to be sent."""
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
        """Return what to put on the wire for this message, and keep it until it is confirmed."""
        self._sent += 1
        frame = ["message", self._sent, message]
        self._kept.append((self._sent, frame))
        return frame

    def is_new(self, number: int) -> bool:
        """Note that message `number` has come; False for one that came before by another connection."""
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def confirm(self, number: int) -> None:
        """Forget the messages up to `number`: the other side has them."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def unconfirmed(self) -> Iterable[Frame]:
        """Return what a new connection has to carry again."""
        return [frame for _, frame in self._kept]


class Awake:
    """Seconds that this process spent awake: while it is stopped or busy elsewhere, nobody is silent.

    Each look adds what has passed since the last one, but `longest` at most.
    """

    def __init__(self, clock: Clock, longest: float) -> None:
        self.now = 0.0
        self._clock = clock
        self._longest = longest
        self._looked = clock()

    def look(self) -> float:
        """Return the seconds so far."""
        now = self._clock()
        self.now += min(now - self._looked, self._longest)
        self._looked = now
        return self.now

    def moment(self, when: float) -> float:
        """Return the `monotonic` time at which a look will say `when`."""
        return self._looked + when - self.now
