"""Launches whose ports are free, for tests of processes that find each other by the id of a launch."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable

from slurmddp.host.ports import candidate_ports

NUMBERS = itertools.count()


def a_launch(ports_of: Callable[[str], list[int]] = candidate_ports) -> str:
    """Return a launch id that no other process uses, and on whose first ports no program listens."""
    while True:
        launch_id = f"{os.getpid()}.{next(NUMBERS)}.0"
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in ports_of(launch_id)[:3]:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return launch_id
