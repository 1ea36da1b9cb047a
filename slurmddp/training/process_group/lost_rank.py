"""Recognise the loss of another rank by the error's type, and by gloo's message where gloo has no type."""

from __future__ import annotations

import re

import torch.distributed as dist

from slurmddp.errors import RankFailure

_GLOO_LOST = re.compile(
    r"\[[^]\s]*/gloo/\S+:\d+\] "
    r"(Connection (closed|reset) by|Connect timeout|Timed out waiting \d+ms|(Read|Write) error|Broken pipe)"
    r"|Application timeout caused pair closure$"
)
"""gloo raises a plain RuntimeError, whose message starts with a line of gloo's source or ends so."""


def is_lost_rank(error: BaseException | None) -> bool:
    """Return whether the error, or one of its causes, is the loss of another rank.

    slurmddp raises RankFailure, torch's store and NCCL raise DistError, gloo a plain RuntimeError.
    """
    while error is not None:
        if isinstance(error, (RankFailure, dist.DistError)):
            return True
        if type(error) is RuntimeError and _GLOO_LOST.match(str(error)):
            return True
        error = error.__cause__
    return False
