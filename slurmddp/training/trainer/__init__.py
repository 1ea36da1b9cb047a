"""Run the default training loop, and build its components from the configuration."""

from slurmddp.training.trainer.loop import token_cross_entropy, train
from slurmddp.training.trainer.metrics import accuracy

__all__ = ["accuracy", "token_cross_entropy", "train"]
