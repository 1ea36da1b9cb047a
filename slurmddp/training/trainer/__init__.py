"""The default training loop, its parts and its records."""

from slurmddp.training.trainer.loop import token_cross_entropy, train

__all__ = ["token_cross_entropy", "train"]
