"""The default training loop and its components."""

from slurmddp.training.trainer.loop import token_cross_entropy, train
from slurmddp.training.trainer.metrics import accuracy

__all__ = ["accuracy", "token_cross_entropy", "train"]
