"""Rides out the hiccups of network file systems: errors that pass by themselves are met by trying again."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""How long to wait before each new try: half a minute together, about what a fail-over of a server takes."""

TRANSIENT = frozenset({
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR, errno.EREMOTEIO, errno.ENOTCONN,
    errno.ESHUTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOLCK, errno.ECOMM,
})  # fmt: skip
"""What servers say that restart or are overloaded. A full disk or a missing permission does not pass."""

log = logging.getLogger(__name__)


def retried(action: Callable[[], T], what: str) -> T:
    """Return `action()`, called again after each transient OSError until the waits are used up."""
    for wait_s in WAITS_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            log.warning("%s: %s; trying again in %g s.", what, error.strerror or error, wait_s)
        time.sleep(wait_s)
    return action()
