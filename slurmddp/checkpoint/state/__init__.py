"""Training states: their tree of plain values, their safetensors bytes, their copies in memory."""

from slurmddp.checkpoint.files.publish import publish
from slurmddp.checkpoint.state.reader import Checkpoint, abandon, find, latest, quarantine_newest, read
from slurmddp.checkpoint.state.writer import check_can_write, write

__all__ = [
    "Checkpoint", "abandon", "check_can_write", "find", "latest", "publish", "quarantine_newest", "read",
    "write",
]  # fmt: skip
