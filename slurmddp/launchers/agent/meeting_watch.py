"""Observe whether the ranks of a person's program connect to each other, by the sockets of node 0.

`slurmddp run` starts any program once per rank. A program that is not distributed then does its whole work
on each rank, and the ranks write the same files. The agent doesn't look into a program, so it recognises such
a program by its sockets. Ranks that meet as under torchrun connect to MASTER_PORT of node 0. The kernel
remembers a closed connection for a minute, except a few that both ends closed at the same moment. Ranks that
meet in another way listen on a port.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection

from slurmddp.host.tcp_sockets import inodes_of, tcp_sockets

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 50.0
"""Longest pause in seconds between two looks at the sockets; the kernel keeps a closed one for a minute."""
_PAUSE_SHARE = 0.1
"""The pause between two looks at the sockets, as a share of the time since the start of the ranks."""


class MeetingWatch:
    """Finds out from the sockets of node 0 whether the ranks of a person's program connect to each other.

    One object serves all worker groups of an attempt: `have_met` stays True once any group has connected.
    """

    def __init__(self) -> None:
        self.have_met = False
        """Whether ranks have connected to each other, or the agent could not read the sockets."""
        self._port = 0
        self._begun = math.inf
        self._next_look = math.inf

    def begin(self, port: int, now: float) -> None:
        """Start to watch a new worker group, whose MASTER_PORT is `port` on this node."""
        self._port = port
        self._begun = now
        self._next_look = now + _SHORTEST_PAUSE_S

    def poll(self, now: float, pids: Collection[int]) -> None:
        """Look at the sockets if the pause since the last look is over; pauses grow from 1 to 50 seconds.

        Args:
            now: the time, on the monotonic clock.
            pids: the processes of the ranks that run.
        """
        if self.have_met or now < self._next_look:
            return

        self.look(pids)
        pause_s = max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * (now - self._begun))
        self._next_look = now + min(pause_s, _LONGEST_PAUSE_S)

    def look(self, pids: Collection[int] = ()) -> None:
        """Set `have_met` if a socket uses MASTER_PORT, or a process of `pids` listens on any port."""
        try:
            sockets = tcp_sockets()
        except OSError:
            self.have_met = True
            return

        # A rank that was just forked still has copies of the agent's sockets, so leave those out.
        inodes = inodes_of(pids) - inodes_of([os.getpid()])
        self.have_met |= any(
            self._port in socket.ports or (socket.listens and socket.inode in inodes) for socket in sockets
        )
