"""Checkpoints as tensors: the tree of a state, its safetensors bytes, its copy in memory."""

from slurmddp.checkpoint.files.publish import publish
from slurmddp.checkpoint.state.reader import Checkpoint, latest, read, set_newest_aside
from slurmddp.checkpoint.state.writer import rehearse, write

__all__ = ["Checkpoint", "latest", "publish", "read", "rehearse", "set_newest_aside", "write"]
