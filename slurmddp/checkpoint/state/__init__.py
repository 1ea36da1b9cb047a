"""Convert training states to a tree of values and safetensors bytes and back, and copy them in memory."""

from slurmddp.checkpoint.files.publish import publish
from slurmddp.checkpoint.state.reader import (
    Checkpoint,
    abandon,
    find,
    go_back,
    latest,
    quarantine_newest,
    read,
)
from slurmddp.checkpoint.state.writer import check_can_write, write

__all__ = [
    "Checkpoint",
    "abandon",
    "check_can_write",
    "find",
    "go_back",
    "latest",
    "publish",
    "quarantine_newest",
    "read",
    "write",
]
