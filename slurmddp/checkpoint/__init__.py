"""Durable, verified checkpoints: tensors and plain values, never pickled code."""

from slurmddp.checkpoint.reader import Checkpoint, latest, read, set_newest_aside
from slurmddp.checkpoint.writer import rehearse, write
from slurmddp.runs.publish import publish

__all__ = ["Checkpoint", "latest", "publish", "read", "rehearse", "set_newest_aside", "write"]
