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
    """Call `action` until it succeeds, and return its result.

    After an OSError in TRANSIENT it is called again, up to six times, after the pauses WAITS_S. Any other
    error, and the error of the last call, is raised.

    Args:
        action: a function that is safe to call again after it has failed.
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

    # This is the last call: its error is raised.
    return action()
