"""The default training loop and its components."""

from slurmddp.training.trainer.loop import token_cross_entropy, train

__all__ = ["token_cross_entropy", "train"]
