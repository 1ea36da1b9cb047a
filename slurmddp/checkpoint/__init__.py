"""Durable, verified checkpoints: tensors and plain values, never pickled code."""

from slurmddp.checkpoint.reader import Checkpoint, latest, read
from slurmddp.checkpoint.writer import publish, rehearse, write

__all__ = ["Checkpoint", "latest", "publish", "read", "rehearse", "write"]
