"""Retry actions after transient errors of network file systems."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each retry: half a minute in total, about the fail-over time of a file server."""

TRANSIENT = frozenset({
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR, errno.EREMOTEIO, errno.ENOTCONN,
    errno.ESHUTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOLCK, errno.ECOMM,
})  # fmt: skip
"""Errors of file servers that restart or are overloaded. A full disk or a missing permission is permanent."""

log = logging.getLogger(__name__)


def retried(action: Callable[[], T], what: str) -> T:
    """Return `action()`; after a transient OSError, call it again, with the pauses of WAITS_S.

    Args:
        action: must be safe to repeat after it has failed.
        what: the action as a noun phrase, for the log: "Writing the checkpoint of step 7".
    """
    for wait_s in WAITS_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            log.warning("%s: %s; trying again in %g s.", what, error.strerror or error, wait_s)
        time.sleep(wait_s)

    # The last try raises its error.
    return action()
