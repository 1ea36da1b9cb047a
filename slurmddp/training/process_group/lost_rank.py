"""Whether an error is the loss of another rank: by its type, and by gloo's words where it has no type."""

from __future__ import annotations

import re

import torch.distributed as dist

from slurmddp.errors import RankFailure

_GLOO_LOST = re.compile(
    r"\[[^]\s]*/gloo/\S+:\d+\] "
    r"(Connection (closed|reset) by|Connect timeout|Timed out waiting \d+ms|(Read|Write) error|Broken pipe)"
    r"|Application timeout caused pair closure$"
)
"""gloo raises a plain RuntimeError. It begins with the place in gloo's source, or has these very words."""


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether the error, or one behind it, is the loss of another rank.

    slurmddp raises RankFailure for that, torch's store and NCCL raise DistError.
    """
    while error is not None:
        if isinstance(error, (RankFailure, dist.DistError)):
            return True
        if type(error) is RuntimeError and _GLOO_LOST.match(str(error)):
            return True
        error = error.__cause__
    return False
