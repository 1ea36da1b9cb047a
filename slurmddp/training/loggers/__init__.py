"""Send the metrics of rank 0 to TensorBoard, CSV, Weights & Biases, MLflow or a logger of the user."""

from slurmddp.training.loggers.logger import LoggedRun, Logger
from slurmddp.training.loggers.memory import MemoryLogger

__all__ = ["LoggedRun", "Logger", "MemoryLogger"]
